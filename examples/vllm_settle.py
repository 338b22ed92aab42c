"""Have a vLLM server compute prompts exactly that it answered approximately, while it is idle.

A client that runs beside the server and keeps the bodies of its requests feeds them here, one JSON
object a line:

    python examples/vllm_settle.py http://127.0.0.1:8000 < requests.jsonl

Each prompt is sent with `mode: exact` and one token of answer as soon as nothing runs or waits.
vLLM computes what it has no exact state of, and the connector stores it: the next request with this
prompt is hit exactly. A `ttl` is kept, and a body that asks for `no_store` is left out; leave
requests with `Cache-Control: no-store` out yourself. With `--priority 1`, and `--scheduling-policy
priority` for the server, whoever comes meanwhile goes first. The environment variable
DEJAKV_API_KEY is the key of the partition.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import httpx

from dejakv.adopt.openai_body import ABOUT_THE_ANSWER

IDLE_S = 1.0
"""Pause between looks at a busy server."""


def settle(
    client: httpx.Client, bodies: Iterable[dict[str, Any]], *, priority: int | None = None
) -> int:
    """Send each prompt that may be stored while the server is idle; return how many were sent.

    `priority` is that of the requests, where the server has priorities.
    """
    sent = 0
    for body in bodies:
        wish = (body.get("kv_transfer_params") or {}).get("dejakv", {})
        if not isinstance(wish, dict) or wish.get("no_store"):
            continue
        exact = {
            name: body[name]
            for name in body
            if name not in ABOUT_THE_ANSWER or name == "cache_salt"
        }
        exact |= {"max_tokens": 1, "kv_transfer_params": {"dejakv": {**wish, "mode": "exact"}}}
        if priority is not None:
            exact["priority"] = priority
        while busy(client):
            time.sleep(IDLE_S)
        route = "chat/completions" if "messages" in body else "completions"
        client.post(f"/v1/{route}", json=exact).raise_for_status()
        sent += 1
    return sent


def busy(client: httpx.Client) -> bool:
    """Whether a request runs or waits."""
    figures = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines if line.startswith(figures))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description="Settle the prompts of request bodies on standard input."
    )
    parser.add_argument("server", help="address of vLLM's OpenAI server")
    parser.add_argument(
        "--priority", type=int, help="of the requests; lower ones go first, others have 0"
    )
    asked = parser.parse_args(arguments)
    key = os.environ.get("DEJAKV_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=asked.server, timeout=None, headers=headers) as client:
        print("settled", settle(client, map(json.loads, sys.stdin), priority=asked.priority))


if __name__ == "__main__":
    main(sys.argv[1:])

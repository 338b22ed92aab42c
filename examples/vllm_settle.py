"""Have a vLLM server compute prompts exactly that it answered approximately, while it is idle.

A client that runs beside the server and keeps the bodies of its requests feeds them here, one JSON object a line:

    python examples/vllm_settle.py http://127.0.0.1:8000 < requests.jsonl

Each prompt is sent with `mode: exact` and one token of answer as soon as nothing runs or waits. vLLM computes what it has no exact state of,
and the connector stores it: the next request with this prompt is hit exactly. With `--scheduling-policy priority` the server also puts whoever
comes meanwhile first.
"""

import json
import sys
import time
from collections.abc import Iterable
from typing import Any

import httpx

IDLE_S = 1.0
"""Pause between looks at a busy server."""


def settle(client: httpx.Client, bodies: Iterable[dict[str, Any]], *, priority: int | None = None) -> int:
    """Send each prompt while the server is idle; the number of prompts. `priority`: of the requests, where the server has priorities."""
    sent = 0
    for body in bodies:
        while busy(client):
            time.sleep(IDLE_S)
        kept = ("model", "prompt", "messages", "tools", "cache_salt")
        exact = {name: body[name] for name in kept if name in body}
        exact |= {"max_tokens": 1, "kv_transfer_params": {"dejakv": {"mode": "exact"}}}
        if priority is not None:
            exact["priority"] = priority
        route = "chat/completions" if "messages" in body else "completions"
        client.post(f"/v1/{route}", json=exact).raise_for_status()
        sent += 1
    return sent


def busy(client: httpx.Client) -> bool:
    """Whether a request runs or waits."""
    figures = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines if line.startswith(figures))


if __name__ == "__main__":
    with httpx.Client(base_url=sys.argv[1], timeout=None) as server:
        print("settled", settle(server, map(json.loads, sys.stdin)))

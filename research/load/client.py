"""An open client of an OpenAI server, which keeps each token's time.

Requests leave when they are due, whatever the server does.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

TIMEOUT_S = 1_800
"""Longer than any queue of a run: a request that is over it has failed."""


@dataclass
class Answer:
    """One streamed answer.

    due     seconds after the beginning of its phase at which the request was to leave
    times   seconds from then to each piece of the answer
    ids     token ids of the answer
    cached  tokens of the prompt that were not computed, by the server's word
    error   why the request failed; empty if it did not
    """

    due: float = 0.0
    times: list[float] = field(default_factory=list[float])
    ids: list[int] = field(default_factory=list[int])
    cached: int = 0
    error: str = ""


def arrivals(count: int, rate: float | None, seed: str) -> list[float]:
    """Return the seconds at which requests of a Poisson process arrive.

    It is given that `count / rate` seconds see just so many: few requests are that load, too.
    Without a rate all arrive at 0.
    """
    rng = random.Random(seed)
    return sorted(rng.uniform(0, count / rate) if rate else 0.0 for _ in range(count))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a limit of connections: the server's queue is the only one."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        yield client


async def ask(client: httpx.AsyncClient, prompt: Sequence[int], salt: str, length: int) -> Answer:
    """Sends a prompt and reads an answer of `length` tokens, greedy.

    Any other answer has an error.
    """
    body = {
        "model": "served", "prompt": list(prompt), "cache_salt": salt, "max_tokens": length,
        "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    answer, began = Answer(), time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = (
                    f"status {response.status_code}: {(await response.aread()).decode()[:300]}"
                )
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    answer.error = str(event["error"])[:300]
                    return answer
                for choice in event["choices"]:
                    if choice["token_ids"]:
                        answer.times.append(time.perf_counter() - began)
                        answer.ids += choice["token_ids"]
                if event.get("usage"):
                    answer.cached = (event["usage"].get("prompt_tokens_details") or {}).get(
                        "cached_tokens"
                    ) or 0
    except httpx.HTTPError as error:
        answer.error = repr(error)
        return answer
    if len(answer.ids) != length:
        answer.error = f"the answer ended after {len(answer.ids)} tokens of {length}"
    return answer


async def play(
    url: str, prompts: Sequence[Sequence[int]], due: Sequence[float], salt: str, length: int
) -> list[Answer]:
    """The answers to prompts that leave when they are due.

    A time is counted from then: a late client is no gain.
    """

    async def one(client: httpx.AsyncClient, prompt: Sequence[int], at: float) -> Answer:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        late = time.perf_counter() - start - at
        answer = await ask(client, prompt, salt, length)
        answer.due, answer.times = at, [late + seconds for seconds in answer.times]
        return answer

    async with connected(url) as client:
        start = time.perf_counter()
        return list(
            await asyncio.gather(
                *(one(client, prompt, at) for prompt, at in zip(prompts, due, strict=True))
            )
        )

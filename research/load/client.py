"""An open client of an OpenAI server: requests leave when they are due, whatever the server does, and each token's time is kept."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import httpx

from dejakv.errors import DejaKVError


class RequestError(DejaKVError):
    """A request was not answered as it has to be. No figure is made of a run in which that happens."""


@dataclass
class Answer:
    """One streamed answer.

    due     seconds after the beginning of its phase at which the request was to leave
    times   seconds from then to each piece of the answer
    ids     token ids of the answer
    cached  tokens of the prompt that were not computed, by the server's word
    """

    due: float = 0.0
    times: list[float] = field(default_factory=list[float])
    ids: list[int] = field(default_factory=list[int])
    cached: int = 0

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.times)]


def arrivals(count: int, rate: float | None, seed: str) -> list[float]:
    """Seconds at which requests of a Poisson process arrive, the first at 0; without a rate all arrive at 0."""
    rng = random.Random(seed)
    gaps = [rng.expovariate(rate) if rate else 0.0 for _ in range(count - 1)]
    return list(accumulate(gaps, initial=0.0))[:count]


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a limit of connections: the server's queue is the only one."""
    async with httpx.AsyncClient(base_url=url, timeout=1_800, limits=httpx.Limits(max_connections=None)) as client:
        yield client


async def ask(
    client: httpx.AsyncClient, prompt: Sequence[int], salt: str, length: int, heard: Callable[[Answer], object] | None = None
) -> Answer:  # fmt: skip
    """Sends a prompt and reads an answer of `length` tokens, greedy. `heard`: called with each piece.

    Raises: RequestError for any other answer.
    """
    body = {
        "model": "served", "prompt": list(prompt), "cache_salt": salt, "max_tokens": length, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    answer, began = Answer(), time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RequestError(f"the server answered {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestError(f"the server broke off: {str(event['error'])[:300]}")
                for choice in event["choices"]:
                    if choice["token_ids"]:
                        answer.times.append(time.perf_counter() - began)
                        answer.ids += choice["token_ids"]
                        if heard is not None:
                            heard(answer)
                if event.get("usage"):
                    answer.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except httpx.HTTPError as error:
        raise RequestError(f"a request failed: {error!r}; the server's log stands beside its store") from error
    if len(answer.ids) != length:
        raise RequestError(f"{len(answer.ids)} tokens of {length}: the answer ended early")
    return answer


async def in_turn(url: str, prompts: Sequence[Sequence[int]], salt: str, length: int) -> list[Answer]:
    """The answers to prompts of which each leaves when the one before is answered."""
    async with connected(url) as client:
        return [await ask(client, prompt, salt, length) for prompt in prompts]


async def play(
    url: str, prompts: Sequence[Sequence[int]], due: Sequence[float], salt: str, length: int
) -> list[Answer]:
    """The answers to prompts that leave when they are due. A time is counted from then: a late client is no gain."""

    async def one(client: httpx.AsyncClient, prompt: Sequence[int], at: float) -> Answer:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        late = time.perf_counter() - start - at
        answer = await ask(client, prompt, salt, length)
        answer.due, answer.times = at, [late + seconds for seconds in answer.times]
        return answer

    async with connected(url) as client:
        start = time.perf_counter()
        return list(await asyncio.gather(*(one(client, prompt, at) for prompt, at in zip(prompts, due, strict=True))))


async def pause_of_another(url: str, prompt: Sequence[int], salt: str) -> tuple[Answer, float]:
    """The answer of one token to a prompt, and the longest time between two tokens of an answer under way meanwhile."""
    under_way = asyncio.Event()
    other = Answer()

    def heard(answer: Answer) -> None:
        nonlocal other
        other = answer
        if len(answer.times) == 5:
            under_way.set()

    async with connected(url) as client:
        task = asyncio.create_task(ask(client, range(100, 140), salt, 2_000, heard))
        waits = asyncio.create_task(under_way.wait())
        await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED)
        if not waits.done():
            waits.cancel()
            await task
        before = len(other.times)
        answer = await ask(client, prompt, salt, 1)
        stop = len(other.times) + 1
        while len(other.times) < stop and not task.done():  # the token of the step in which the prompt's came
            await asyncio.sleep(0.01)
        if task.done():
            await task
            raise RequestError("the answer under way ended before the prompt's first token: give it more tokens")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return answer, max(after - earlier for earlier, after in pairwise(other.times[before - 1 : stop]))

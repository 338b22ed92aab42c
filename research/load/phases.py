"""What is done with running servers. Each function gives rows: JSON objects from which `figures` are made."""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.errors import DejaKVError
from research.load.client import arrivals, in_turn, pause_of_another, play
from research.load.figures import ALL_AT_ONCE, ARMS, BASE, Row, capacity
from research.load.server import VLLMServer
from research.load.stream import MIX, mixed, phases, prompts_of

ANSWER = 16
"""Tokens of an answer under load."""
EXACT_TOKENS = 2_000
MISSES = {"smollm2-135m": 24, "docs-lm": 96}
"""Prompts of a turn by model: some seconds' work."""

Servers = Mapping[str, VLLMServer]


@dataclass(frozen=True)
class Settings:
    """What a run measures. Only a run of the same goes on with its rows.

    requests  of a phase that share text with others
    warm      prompts that are served before, one at a time
    loads     percent of prefix caching's capacity at which requests arrive
    rounds    how often the stream is served, each time in a partition of its own and with other arrivals
    turns     of `exact` and `misses`
    """

    model: str
    workloads: tuple[str, ...]
    loads: tuple[int, ...]
    requests: int
    warm: int
    rounds: int
    turns: int
    threads: int
    kv_gib: int

    def seconds(self, workload: str, rate: float) -> float:
        """About how long one round of a workload takes, at so many requests a second for each arm and prompts of one length."""
        each = self.requests * (2 if workload == MIX else 1)
        return len(ARMS) * (self.warm + each + sum(each * max(1.0, 100 / load) for load in self.loads)) / rate


def turned(number: int, arms: Sequence[str] = ARMS) -> list[str]:
    """The arms, another one first each time."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


def loaded(servers: Servers, settings: Settings, workload: str, number: int, rate: float | None) -> Iterator[Row]:
    """A round of a workload: prompts served before, a phase with all at once, and one for each load.

    rate  prefix caching's requests a second, from an earlier round; None: that of this one
    """
    salt = f"{workload}-{number}"  # vLLM takes no slash
    prompts = prompts_of(workload, settings.warm + settings.requests * (1 + len(settings.loads)))
    before, *parts = phases(prompts, settings.warm, settings.requests)
    for arm in turned(number):
        asyncio.run(in_turn(servers[arm].url, [prompt.ids for prompt in before], salt, ANSWER))
    for place, load in enumerate((ALL_AT_ONCE, *map(str, settings.loads))):
        seed = f"{salt}/{load}"
        part = mixed(parts[place], seed) if workload == MIX else parts[place]
        offered = None if load == ALL_AT_ONCE or rate is None else rate * int(load) / 100
        due = arrivals(len(part), offered, seed)
        for arm in turned(number + place):
            servers[arm].settle()
            counted = servers[arm].counters()
            answers = asyncio.run(play(servers[arm].url, [prompt.ids for prompt in part], due, salt, ANSWER))
            counters = {name: value - counted.get(name, 0) for name, value in servers[arm].counters().items()}
            requests = [
                {
                    "tokens": len(prompt.ids), "prefix": prompt.prefix, "blendable": prompt.blendable, "stranger": prompt.stranger,
                    **vars(answer), "times": [round(seconds, 4) for seconds in answer.times],
                }
                for prompt, answer in zip(part, answers, strict=True)
            ]  # fmt: skip
            row: Row = {
                "part": "load",
                "workload": workload,
                "round": number,
                "load": load,
                "arm": arm,
                "rate": offered,
            }
            row |= {"counters": {name: value for name, value in counters.items() if value}, "requests": requests}
            if load == ALL_AT_ONCE and arm == BASE and rate is None:
                rate = capacity(row)
            yield row


def exact_hits(servers: Servers, settings: Settings) -> Iterator[Row]:
    """By turn: the first token of a stored prompt that vLLM's own prefix cache no longer holds, beside computing it where there is no
    connector; then both again while another answer is under way, and that answer's longest pause."""
    text = [token for prompt in prompts_of("rag", 2 * settings.turns + 2) for token in prompt]
    plain, exact = servers[BASE], servers["exact"]

    async def alone(server: VLLMServer, prompt: Sequence[int], salt: str) -> Any:
        return (await in_turn(server.url, [prompt], salt, 1))[0]

    for turn in range(settings.turns + 1):
        prompt, salt = text[turn * EXACT_TOKENS : (turn + 1) * EXACT_TOKENS], f"exact-{turn}"
        if len(prompt) < EXACT_TOKENS:
            raise DejaKVError(f"the text ends before turn {turn}: ask for fewer turns")
        asyncio.run(in_turn(exact.url, [prompt], salt, 2))  # two tokens: state is saved after the first one
        exact.forget_prefixes()
        hit = asyncio.run(alone(exact, prompt, salt))
        exact.forget_prefixes()
        again, pause = asyncio.run(pause_of_another(exact.url, prompt, salt))
        full = asyncio.run(alone(plain, prompt, salt))
        plain.forget_prefixes()
        _, pause_of_full = asyncio.run(pause_of_another(plain.url, prompt, salt))
        plain.settle()
        if min(hit.cached, again.cached) < EXACT_TOKENS - 1 or hit.ids != full.ids:
            raise DejaKVError(f"no exact hit: {hit.cached} and {again.cached} tokens came from the store")
        if turn:  # the first one warms up
            times = {
                "hit_ms": hit.times[0],
                "full_ms": full.times[0],
                "pause_of_hit_ms": pause,
                "pause_of_full_ms": pause_of_full,
            }
            yield {"part": "exact", "tokens": EXACT_TOKENS, **{name: 1e3 * seconds for name, seconds in times.items()}}  # fmt: skip


def misses(servers: Servers, settings: Settings, model: str) -> Iterator[Row]:
    """By turn and arm: requests a second of new prompts that arrive at once, and processor seconds until their state is stored."""
    for turn in range(settings.turns + 1):
        rng = random.Random(f"misses/{turn}")
        prompts = [rng.choices(range(8, 480), k=rng.choice((64, 200, 400, 800))) for _ in range(MISSES[model])]
        for arm in turned(turn, (BASE, "exact")):
            server, salt = servers[arm], f"misses-{turn}"
            server.settle()
            used = server.cpu_seconds()
            answers = asyncio.run(play(server.url, prompts, [0.0] * len(prompts), salt, 4))
            server.settle()
            row: Row = {"part": "misses", "model": model, "arm": arm, "prompts": len(prompts)}
            row |= {"cpu_seconds": server.cpu_seconds() - used}
            row["requests_per_second"] = len(prompts) / max(answer.times[-1] for answer in answers)
            if turn:
                yield row

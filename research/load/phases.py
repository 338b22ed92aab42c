"""A round of a workload against running servers.

It gives rows: JSON objects from which `figures` are made.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.errors import DejaKVError
from research.load.client import arrivals, play
from research.load.figures import ALL_AT_ONCE, ARMS, BASE, Row, errors_of
from research.load.server import VLLMServer
from research.load.stream import MIX, Prompt, mixed, phases, prompts_of

ANSWER = 16
"""Tokens of an answer."""

Servers = Mapping[str, VLLMServer]


@dataclass(frozen=True)
class Settings:
    """What a run measures. A run of other workloads or rounds goes on with its rows.

    requests  of a phase; half of those of `mix` share nothing
    warm      prompts that are served before, all at once
    loads     percent of the rate at which prefix caching served those before, at which requests
              arrive
    rounds    how often the stream is served, each time in a partition of its own and with other
              arrivals
    kv_gib    KV cache of each server
    """

    workloads: tuple[str, ...]
    loads: tuple[int, ...]
    requests: int
    warm: int
    rounds: int
    kv_gib: int


def turned(number: int) -> list[str]:
    """The arms, another one first each time."""
    first = number % len(ARMS)
    return [*ARMS[first:], *ARMS[:first]]


def loaded(
    servers: Servers, settings: Settings, workload: str, number: int, rate: float | None
) -> Iterator[Row]:
    """Yield the rows of a round of a workload.

    It has prompts served before, a phase for each load, and one with all at once, which finds most
    in the store.

    Parameters
    ----------
    servers : Servers
        A server for each arm.
    settings : Settings
        What a run measures.
    workload : str
        Name of the workload.
    number : int
        Number of the round.
    rate : float or None
        Requests a second of prefix caching for the prompts before, from an earlier round; None:
        those of this one.

    Raises
    ------
    DejaKVError
        For a failed request of prefix caching alone, or of those served before: nothing can be
        compared then.
    """
    salt = f"{workload}-{number}"  # vLLM takes no slash
    each = settings.requests // 2 if workload == MIX else settings.requests
    prompts = prompts_of(workload, settings.warm + each * (1 + len(settings.loads)))
    before, *parts = phases(prompts, settings.warm, each)
    for arm in turned(number):
        for server in servers.values():
            server.settle()
        answers = asyncio.run(
            play(
                servers[arm].url,
                [prompt.ids for prompt in before],
                [0.0] * len(before),
                salt,
                ANSWER,
            )
        )
        if errors := [answer.error for answer in answers if answer.error]:
            raise DejaKVError(
                f"{arm} failed {len(errors)} of the {len(answers)} requests before: {errors[0]}"
            )
        if arm == BASE:
            rate = rate or len(answers) / max(answer.times[-1] for answer in answers)
    assert rate is not None
    for place, load in enumerate((*map(str, settings.loads), ALL_AT_ONCE)):
        part = mixed(parts[place], f"{salt}/{load}") if workload == MIX else parts[place]
        offered = None if load == ALL_AT_ONCE else rate * int(load) / 100
        due = arrivals(len(part), offered, f"{salt}/{load}")
        for arm in turned(number + place):
            for server in servers.values():
                server.settle()
            row: Row = {
                "workload": workload,
                "round": number,
                "load": load,
                "arm": arm,
                "rate": offered,
            }
            row |= _phase(servers[arm], part, due, salt)
            if arm == BASE and (errors := errors_of([row])):
                raise DejaKVError(
                    f"{arm} failed {len(errors)} of {len(part)} requests: {errors[0]}"
                )
            yield row


def _phase(
    server: VLLMServer, part: Sequence[Prompt], due: Sequence[float], salt: str
) -> dict[str, Any]:
    counted = server.counters()
    answers = asyncio.run(play(server.url, [prompt.ids for prompt in part], due, salt, ANSWER))
    counters = {name: value - counted.get(name, 0) for name, value in server.counters().items()}
    requests = [
        {
            "tokens": len(prompt.ids), "prefix": prompt.prefix, "blendable": prompt.blendable,
            "stranger": prompt.stranger,
            **vars(answer), "times": [round(seconds, 4) for seconds in answer.times],
        }
        for prompt, answer in zip(part, answers, strict=True)
    ]  # fmt: skip
    return {
        "counters": {name: value for name, value in counters.items() if value},
        "requests": requests,
    }

"""Two replicas with one cache beside one alone, on the same stream.

The figure is the share of prompt tokens that each reuses.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.errors import DejaKVError
from dejakv.experiments.compare import sampling_of
from dejakv.request import Request
from research.many_machines.replica import Replica, Told
from research.many_machines.services import Services
from research.workloads.streams import Stream, chosen_of

MODEL = "smollm2-135m"
COSTS = (1e-2, 0.0, 1e-9, 1e-3)
"""Fixed: a decision by measured times would not be the same in both.

A row's is that of one core, so that a bucket on a busy machine pays, too.
"""
PAUSE = 0.25
"""Seconds between an answer whose state all replicas know and the next request, of one replica too.
"""
_LONGEST = 60.0


def hit_rates(services: Services, streams: Sequence[Stream], model: str = MODEL) -> dict[str, Any]:
    """Return `hit_rate_one` and `hit_rate_two` over all streams, and each by workload.

    Of two replicas there are also the rates of each, beside one's on the requests that it had. The
    requests go to the two in turns.

    Raises
    ------
    DejaKVError
        If a replica fails.
    """
    replicas = [Replica(model), Replica(model)]
    workloads: dict[str, Any] = {}
    pooled: dict[str, list[Told]] = {"one": [], "two": []}
    try:
        for replica in replicas:
            if not replica.ready(300):
                raise DejaKVError("a replica did not start")
        for stream in streams:
            chosen, prompter, _ = chosen_of(stream)
            sampling = sampling_of(stream.settings)
            requests = [prompter.request(sample, sampling) for sample in chosen]
            one, two = (
                _served(some, requests, stream.settings.cache, services)
                for some in (replicas[:1], replicas)
            )
            pooled["one"] += one
            pooled["two"] += two
            workloads[stream.settings.dataset] = {
                "requests": len(requests),
                "prompt_tokens": sum(told["prompt_tokens"] for told in one),
                "one": rate(one),
                "two": rate(two),
                "replicas": [{"two": rate(two[at::2]), "one": rate(one[at::2])} for at in range(2)],
                "decisions": [
                    {
                        name: [told[name] for told in both]
                        for name in ("method", "reused_tokens", "plans", "reason")
                    }
                    for both in zip(one, two, strict=True)
                ],
            }
    finally:
        for replica in replicas:
            replica.close()
    return {
        "hit_rate_one": rate(pooled["one"]),
        "hit_rate_two": rate(pooled["two"]),
        "workloads": workloads,
    }


def rate(told: Sequence[Told]) -> float:
    """Return the share of prompt tokens that were not computed."""
    return sum(one["reused_tokens"] for one in told) / max(
        1, sum(one["prompt_tokens"] for one in told)
    )


def _served(
    replicas: Sequence[Replica],
    requests: Sequence[Request],
    config: SemanticCacheConfig,
    services: Services,
) -> list[Told]:
    config = replace(config, store=services.place(), feed=services.valkey.url, costs=COSTS)
    for replica in replicas:
        replica.open(config)
    made: list[Told] = []
    for number, request in enumerate(requests):
        told = replicas[number % len(replicas)].ask(request, settle=True)
        if told is None or "error" in told:
            raise DejaKVError(f"a replica failed: {told}")
        made.append(told)
        _wait_for_all(replicas)
        time.sleep(PAUSE)
    return made


def _wait_for_all(replicas: Sequence[Replica]) -> None:
    """Wait until each replica knows as much as the others.

    How soon that is, `places.found` measures. A DejaKVError tells that it takes long.
    """
    until = time.monotonic() + _LONGEST
    while len({(replica.entries() or {}).get("entries") for replica in replicas}) > 1:
        if time.monotonic() > until:
            raise DejaKVError(f"a replica did not find in {_LONGEST:.0f} s what another stored")
        time.sleep(0.02)

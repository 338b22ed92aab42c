"""What the connector costs requests that reuse nothing: the same mixed load with and without it, capture on.

    .venv-vllm/bin/python -m research.vllm_misses
    .venv-vllm/bin/python -m research.vllm_misses --model qwen2.5-0.5b --turns 5

Both arms answer the same 64 prompts (16 for a real model's shape) of 64 to 800 tokens, in batches of 8, one arm right after the other. An arm's turn lasts until
everything is stored, so the connector pays for its writes too. Goal: within 10% on two CPU cores.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from research.vllm_bench import (
    Server,
    arguments,
    command_of,
    paired,
    parsed,
    publish,
    quantiles,
    repeats,
    result_in,
    tokens,
)

Turn = Callable[[int], dict[str, Any]]


class Arm:
    """One arm's process."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        command, environment = command_of(name, given)
        self._name = name
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def turn(self, number: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(number, file=self._process.stdin, flush=True)
        found = result_in(self._process.stdout)
        if found is not None:
            return found
        raise SystemExit(f"the arm {self._name} ended: run `{sys.argv[0]} --arm {self._name}` and type 0 to see why")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main(
    about: str, arms: Sequence[str], start: Callable[[str], Turn], report: Callable[..., dict[str, Any]], turns: int
) -> None:
    """Runs the arms in turns and prints one JSON object. `start(arm)` runs in the arm's process and gives what does a turn; turn
    0 warms up and is not reported."""
    parser = arguments(about)
    parser.add_argument("--turns", type=int, default=turns, help="how often each arm works")
    given = parsed(parser)
    if given.arm:
        turn = start(given.arm)
        for line in sys.stdin:
            print("RESULT " + json.dumps(turn(int(line))), flush=True)
        return
    processes = {name: Arm(name, given) for name in arms}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(given.turns + 1):
        for shift in range(len(arms)):
            name = arms[(shift + number) % len(arms)]
            result = processes[name].turn(number)
            if number:
                results[name].append(result)
    for process in processes.values():
        process.close()
    publish(given, {"turns": given.turns, **report(results)})


BATCH = 8


def start(arm: str) -> Turn:
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    server = Server({"store_dir": f"{folder.name}/kv"} if arm == "connector" else None)

    def turn(number: int) -> dict[str, Any]:
        assert folder.name
        rng, requests = random.Random(number), repeats(64, 16)
        load = [tokens(rng.choice([64, 200, 400, 800]), 1000 * number + index) for index in range(requests)]
        began, ttfts = time.perf_counter(), []
        for first in range(0, requests, BATCH):
            outputs = server.run(load[first : first + BATCH], max_tokens=8)
            assert all(output["cached"] == 0 for output in outputs)
            ttfts += [output["ttft"] for output in outputs]
        server.stored()
        return {"tokens_per_second": sum(map(len, load)) / (time.perf_counter() - began), **quantiles(ttfts)}

    return turn


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    pairs = list(zip(results["plain"], results["connector"], strict=True))
    return {
        "benchmark": "misses",
        "arms": {
            arm: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for arm, runs in results.items()
        },
        "throughput_change": paired([w["tokens_per_second"] / p["tokens_per_second"] - 1 for p, w in pairs]),
        "ttft_p50_change": paired([w["p50_ms"] / p["p50_ms"] - 1 for p, w in pairs]),
        "goal": "within 10% on two CPU cores",
    }


if __name__ == "__main__":
    main(__doc__ or "", ("plain", "connector"), start, report, turns=16)

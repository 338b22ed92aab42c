"""Arms that take short turns: each is a process that stays, and does the same work as the others before anything else changes.

A machine that others share drifts within minutes. What two arms do within the same seconds can be compared all the same.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import vllm_bench
from vllm_models import DOCS, NAMES

Turn = Callable[[int], dict[str, Any]]


class Arm:
    """One arm's process."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "TORCHDYNAMO_DISABLE": "1"}
        command = [sys.executable, "-W", "ignore", sys.argv[0], "--arm", name, "--model", given.model]
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
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[7:])
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
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--turns", type=int, default=turns, help="how often each arm works")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS")
    parser.add_argument("--model", choices=NAMES, default=DOCS, help="its weights are random if it is not bundled")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    given = parser.parse_args()
    vllm_bench.MODEL = given.model
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
    about_run = {"machine": vllm_bench.machine(), "model": given.model, "threads": given.threads, "turns": given.turns}
    text = json.dumps({**about_run, **report(results)}, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")

"""Arms that take short turns: each is a process that stays, and does the same work as the others before anything else changes.

A machine that others share drifts within minutes. What two arms do within the same seconds can be compared all the same.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from research.vllm_bench import arguments, command_of, parsed, publish, result_in

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

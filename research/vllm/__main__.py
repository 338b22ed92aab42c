"""The command: an arm in a process, in turns."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import research.vllm as package
from research.machine import measured
from research.vllm.benchmarks import BENCHMARKS
from research.vllm.server import MODELS


def main() -> None:
    """Runs the arms of a benchmark in turns and prints one JSON object; with `--arm`, one run of
    that arm.
    """
    parser = argparse.ArgumentParser(
        prog="python -m research.vllm", description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name}: {one.about}" for name, one in BENCHMARKS.items()),
    )  # fmt: skip
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=MODELS[0],
        help="its weights are random if it is not bundled",
    )
    parser.add_argument("--pairs", type=int, default=4, help="how often each arm runs, default 4")
    parser.add_argument(
        "--prompts", type=int, default=6, help="of ttft and decoding, of each run, default 6"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1960],
        help="tokens of a prompt of ttft, default 1960",
    )
    parser.add_argument(
        "--only", help="run this arm alone, where the arms are not compared with each other (ttft)"
    )
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS, default 1")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--pair", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = BENCHMARKS[given.benchmark]
    if given.arm:
        print("RESULT " + json.dumps(chosen.worker(given.arm, given.pair, given)))
        return
    arms = [arm for arm in chosen.arms if given.only in (None, arm)]
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for pair in range(given.pairs):
        for turn in range(len(arms)):
            arm = arms[(turn + pair) % len(arms)]
            results[arm].append(_spawn(arm, pair, given.threads))
    told = {
        "benchmark": given.benchmark,
        "model": given.model,
        "pairs": given.pairs,
        **measured("research.vllm"),
    }
    text = json.dumps({**told, **chosen.report(results, given)}, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


def _spawn(arm: str, pair: int, threads: int) -> dict[str, Any]:
    import torch

    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if not torch.cuda.is_available():
        environment["TORCHDYNAMO_DISABLE"] = "1"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        package.__name__,
        *sys.argv[1:],
        "--arm",
        arm,
        "--pair",
        str(pair),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    raise SystemExit(f"the arm {arm} did not finish:\n{done.stdout[-500:]}\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()

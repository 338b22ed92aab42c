"""The command: one stream in this process, several in a process each, then the report."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import research.workloads as package
from dejakv.blend.settings import QUALITIES
from dejakv.cli.progress import watching
from dejakv.datasets.registry import WORKLOADS
from dejakv.errors import DejaKVError
from research.workloads import report
from research.workloads.measure import finished, measure
from research.workloads.streams import PROMOTING, REQUESTS, stream_of

OUTPUT = Path("runs/workloads")
ENGINES = ("transformers", "vllm")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 for a mistake, 130 after an interrupt."""
    parser = argparse.ArgumentParser(
        prog="python -m research.workloads", description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--workload",
        action="append",
        choices=WORKLOADS,
        help="may be given more than once; default all",
    )
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, help=f"of each workload, default {REQUESTS}"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="how often every request comes, default 1"
    )
    parser.add_argument(
        "--arm", action="append", choices=("none", *QUALITIES, PROMOTING), default=[],
        help="measure this one beside prefix caching; may be given more than once. Default all:"
        " answers are compared where `none` is among them",
    )  # fmt: skip
    parser.add_argument(
        "--rounded", action="store_true",
        help="measure full computation in bf16 alone; the report compares its answers with those"
        " of the same requests in fp32",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default {OUTPUT}")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, write tables and picture"
    )
    given = parser.parse_args(arguments)
    try:
        return _report(given.output) if given.report else _measure(given)
    except DejaKVError as error:
        print(f"research.workloads: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _measure(given: argparse.Namespace) -> int:
    streams = [
        stream_of(
            name, given.engine, given.requests, given.repeat, given.arm, rounded=given.rounded
        )
        for name in given.workload or WORKLOADS
    ]
    left = [stream for stream in streams if not finished(stream, given.output)]
    if len(left) == 1:
        with watching(Console(stderr=True)) as watch:
            if not measure(left[0], given.output, watch):
                print("research.workloads: stopped, the same command goes on", file=sys.stderr)
                return 130
    else:
        for stream in (
            left
        ):  # a process each: nothing of one is in the memory of another, and vLLM is one a process
            told = ["--workload", stream.settings.dataset, "--engine", given.engine]
            told += [
                "--requests",
                str(given.requests),
                "--repeat",
                str(given.repeat),
                "--output",
                str(given.output),
            ]
            told += [word for arm in given.arm for word in ("--arm", arm)] + [
                "--rounded"
            ] * given.rounded
            status = subprocess.run([sys.executable, "-m", package.__name__, *told]).returncode
            if status:
                return status
    return _report(given.output)


def _report(output: Path) -> int:
    found = report.summaries(output)
    report.write(output, found)
    drawn = f", {report.NAME}.png and .svg" if report.draw(found, output) else ""
    print(f"written to {output}: {report.NAME}.md, {report.NAME}.json{drawn}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

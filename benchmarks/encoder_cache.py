"""The encoder cache measured: agents that share pictures, lookups at 100,000 entries, hit rates on Zipf traces.

    python benchmarks/encoder_cache.py --output docs/results/encoder_cache

writes the .json and the .md. `--parts agents,lookup,traces` measures some of it and keeps what the .json has of the others,
each with the command and machine it was measured by. Needs the extra `test` (cachetools, for comparison).
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cachetools
from encoder_cache_measure import agents_part, lookup_part, traces_part

PARTS = {"agents": agents_part, "lookup": lookup_part, "traces": traces_part}


def machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cachetools": cachetools.__version__,
    }


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines] + [""]


def report(result: dict[str, Any]) -> str:
    """The Markdown page: every number in it is from `result`."""
    lines = ["# Encoder cache: measured", ""]
    for part, write in {"agents": report_agents, "lookup": report_lookup, "traces": report_traces}.items():
        if part in result:
            title, *body = write(result[part])
            lines += [title, "", *provenance(result[part]["measured"]), *body]
    return "\n".join(lines).rstrip() + "\n"


def provenance(measured: dict[str, Any]) -> list[str]:
    where = measured["machine"]
    return [
        f"`{measured['command']}`, {measured['date']}",
        "",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_at_start']} at the start, OMP_NUM_THREADS "
        f"{where['threads']}, Python {where['python']}, cachetools {where['cachetools']}, {where['system']}.",
    ]


def report_agents(part: dict[str, Any]) -> list[str]:
    arms = part["arms"]
    repetitions = len(arms["with"]["encoder_runs"])
    gain = statistics.median(arms["with"]["requests_per_cpu_s"]) / statistics.median(
        arms["without"]["requests_per_cpu_s"]
    )
    tower = statistics.median(part["encoder_ms_a_picture"])
    share = tower / statistics.median(arms["without"]["ttft_ms"])
    return [
        "## Agents that share pictures, on shapes-vlm (transformers engine)",
        "",
        f"{part['agents']} agents (threads), {part['requests']} requests over {part['distinct_pictures']} distinct pictures "
        f"(Zipf, exponent {part['zipf_exponent']}), both arms {repetitions} times in turns, cache empty at the start of each. "
        "Median (least to most).",
        "",
        *table(
            ["", "encoder runs", "requests/s", "requests per CPU second", "median TTFT, ms"],
            [
                [
                    f"{name} the cache",
                    max(arm["encoder_runs"]),
                    spread(arm["requests_per_s"]),
                    spread(arm["requests_per_cpu_s"]),
                    spread(arm["ttft_ms"]),
                ]
                for name, arm in arms.items()
            ],
        ),
        f"Repetitions with an answer that differs from the first run without the cache: {part['runs_with_another_answer']}.",
        "",
        f"The tower of this model takes {tower:.1f} ms a picture, {share:.0%} of the median time to the first token without the cache; "
        f"what skipping it brings is {gain:.2f} times the requests per CPU second. What scales is the "
        "count of encoder runs; with a production tower, which takes a large part of the time to the first token, the same "
        "runs weigh more. Times were taken on a shared machine: read them with their spread.",
        "",
    ]


def report_lookup(part: dict[str, Any]) -> list[str]:
    rows = [
        [name, what, figures["p50_us"], figures["p99_us"], figures["cpu_us"]]
        for name, measured in part.items()
        if isinstance(measured, dict) and name != "measured"
        for what, figures in measured.items()
    ]
    return [
        f"## Lookups at {part['entries']:,} entries",
        "",
        f"{part['lookups']:,} calls each, one thread, keys are SHA-256 digests computed beforehand. Microseconds. p50 and p99 are of "
        "single calls and include two readings of the clock (first line); CPU is the mean CPU time of a call in a loop without them.",
        "",
        *table(["cache", "call", "p50", "p99", "CPU"], rows),
        "A miss costs more than cachetools' because it is counted by partition, a store because it checks the embedding (shape, "
        "NaN), measures its bytes and keeps two budgets; either is small beside hashing the bytes.",
        "",
    ]


def report_traces(part: dict[str, Any]) -> list[str]:
    rates = part["hit_rate"]
    names = list(next(iter(rates.values())))
    saving = part["encoder_seconds_saved"]
    return [
        "## Hit rates",
        "",
        f"{part['length']:,} requests over {part['items']:,} pictures of one size, Zipf exponent {part['zipf_exponent']}, budget in "
        "entries. Belady's optimum knows the future and may decline to admit.",
        "",
        *table(["trace", *names], [[trace, *(f"{rate:.3f}" for rate in by.values())] for trace, by in rates.items()]),
        "Where popularity never changes, LFU without ageing is ahead of ours by what ageing forgets; where it changes, it keeps "
        "yesterday's favourites for ever. With a large budget and changing favourites recency (`lru`) is a little ahead of `lfu`.",
        "",
        "## Encoder seconds saved, pictures of different bytes and seconds",
        "",
        f"Budget {saving['share_of_all_bytes']:.0%} of all bytes ({saving['budget_bytes']:,}). Bytes vary 64-fold, seconds 100-fold, "
        "independently of each other and of popularity.",
        "",
        *table(
            ["policy", "share of encoder seconds saved", "hit rate"],
            [
                [policy, f"{saving[policy]['seconds_saved']:.3f}", f"{saving[policy]['hits']:.3f}"]
                for policy in ("lru", "lfu", "cost")
            ],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The encoder cache measured.")
    parser.add_argument("--parts", default="agents,lookup,traces")
    parser.add_argument("--output", type=Path, help="path without suffix; .json and .md are written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exponent", type=float, default=1.0, help="of the Zipf distributions")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--lookups", type=int, default=200_000)
    parser.add_argument("--evictions", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--trace", type=int, default=200_000)
    given = parser.parse_args()
    file = given.output.with_suffix(".json") if given.output else Path()
    result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    measured = {
        "command": f"python benchmarks/encoder_cache.py {shlex.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for name in filter(None, given.parts.split(",")):
        if name not in PARTS:
            parser.error(f"unknown part {name!r}: choose from {', '.join(PARTS)}")
        result[name] = {**PARTS[name](given), "measured": measured}
    if given.output:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
    page = report(result)
    print(page)
    if given.output:
        given.output.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()

"""What `lookup.py` says of its measurements: a table, the goals, the machine."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| look-up | entries | best µs | p50 µs | p99 µs | recall@1 | add µs |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        recall = f"{row['recall_at_1']:.3f}" if "recall_at_1" in row else ""
        added = f"{row['add_us']:.1f}" if "add_us" in row else ""
        lines.append(
            f"| {row['what']} | {row['entries']:,} | {row['best_us']:,.1f} | {row['p50_us']:,.1f} | {row['p99_us']:,.1f} | {recall} | {added} |"
        )
    return "\n".join(lines)


def goals(rows: Sequence[Row]) -> Iterator[str]:
    """The goals of the design, with what was measured."""
    best = {(row["what"], row["entries"]): row["best_us"] for row in rows}
    p50 = {(row["what"], row["entries"]): row["p50_us"] for row in rows}
    recall = {(row["what"], row["entries"]): row.get("recall_at_1", 0.0) for row in rows}
    for size in sorted({row["entries"] for row in rows}):
        if ("exact, hit", size) in p50:
            yield f"exact hit at {size:,}: {p50['exact, hit', size]:.1f} µs (goal: under 20)"
        ours, raw = p50.get(("semantic, flat", size)), p50.get(("raw FAISS, k=8", size))
        if ours and raw:
            least = best["semantic, flat", size] / best["raw FAISS, k=8", size]
            yield f"semantic flat against raw FAISS at {size:,}: {ours / raw:.2f}x at p50, {least:.2f}x at best (goal: 1.1x)"
        graph, peer = p50.get(("semantic, hnsw", size)), p50.get(("GPTCache", size))
        if graph:
            share = recall["semantic, hnsw", size]
            yield f"semantic HNSW at {size:,}: {graph / 1000:.3f} ms at recall@1 {share:.3f} (goal at 100,000: 0.2 ms, 0.98)"
        if peer and ours:
            graph_text = f", {peer / graph:.0f}x against HNSW" if graph else ""
            yield f"GPTCache at {size:,} takes {peer / ours:.1f}x as long as flat{graph_text} (goal: 10x)"


def machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].split(":")[1].strip() if names else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "faiss": faiss.__version__,
        "faiss_threads": faiss.omp_get_max_threads(),
        "load_average": os.getloadavg()[0],
    }


def write(rows: Sequence[Row], about: dict[str, Any], args: argparse.Namespace) -> None:
    """The results as JSON and as a page, where they were asked for."""
    lines, command = list(goals(rows)), "OMP_NUM_THREADS=1 python benchmarks/lookup.py " + " ".join(sys.argv[1:])
    about = {**about, "load_average_at_end": os.getloadavg()[0]}
    if args.json:
        args.json.write_text(
            json.dumps({"machine": about, "command": command, "rows": rows, "goals": lines}, indent=1) + "\n"
        )
    if args.markdown:
        facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())
        notes = "\n".join(f"- {line}" for line in lines)
        args.markdown.write_text(
            f"# Look-ups\n\n{table(rows)}\n\n{notes}\n\nMachine: {facts}.\n\nCommand: `{command}`\n"
        )

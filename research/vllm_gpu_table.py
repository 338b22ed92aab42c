"""A table for one machine: the first token of exact hits and of blends against full prefill, by model and length of the prompt.

    python -m research.vllm_gpu_table --output table.json                  # a GPU with 24 GB or more
    python -m research.vllm_gpu_table --small                              # the same models, tiny: to try it, also on a CPU

The shapes of Mistral-7B and Llama-3.1-8B with random weights in bf16, prompts of 1,000 to 32,000 random tokens. By length: the median
time to the first token of a prompt that is computed in full, of the same work as an exact hit that vLLM's own prefix cache no longer
holds, and as a blend of 15% of the rows from a prompt of which a passage of 5% near the beginning was edited, so that all keys
behind it move. Each model runs in a process of its own; `spread` is the greatest value by the least.
It has not been run on a GPU yet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research import vllm_bench
from research.vllm_bench import LARGE, Server, changed, machine, result_in, this_module, tokens

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
SMALL_LENGTHS = (1_000, 2_000)
ANSWER, EDIT = 2, 20
"""Tokens of an answer, and where the edit begins."""


def measure(model: str, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """The rows of one model, in this process."""
    vllm_bench.MODEL = model
    on_gpu = _has_gpu()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        extra = {
            "store_dir": f"{folder}/kv",
            "modes": ["off", "exact", "blend"],
            "max_bytes": 24 << 30,
            "max_pending_bytes": 8 << 30,
            "blend_share": 0.15,
            "lookup_timeout_s": 60,
            "load_timeout_s": 600,
        }
        options: dict[str, Any] = {"enforce_eager": False, "block_size": 16} if on_gpu else {}
        server = Server(extra, max_model_len=max(lengths) + 2 * ANSWER, **options)
        return [_row(server, model, length, repeats) for length in lengths]


def _row(server: Server, model: str, length: int, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"full": [], "exact": [], "blend": []}
    computed, nbytes = [], []
    for number in range(repeats + 1):
        base = tokens(length, 1000 * length + number)
        edited = changed(base, 0.05, number, start=EDIT)
        near = edited[:EDIT] + edited[EDIT + length // 60 :]
        _ask(server, base, {"mode": "exact"})
        server.settle()
        server.forget_prefixes()
        full = _ask(server, near, {"mode": "off", "no_store": True})
        server.forget_prefixes()
        blend = _ask(server, near, {"mode": "blend", "no_store": True})
        server.forget_prefixes()
        exact = _ask(server, base, {"mode": "exact"})
        server.forget_prefixes()
        if blend["told"]["method"] != "blend" or exact["told"]["method"] != "exact":
            raise SystemExit(f"{model}, {length} tokens: no reuse: {blend['told']}, {exact['told']}")
        if number:  # the first one warms up, and carries the model check
            for name, found in (("full", full), ("exact", exact), ("blend", blend)):
                times[name].append(found["ttft"])
            computed.append(blend["told"]["tokens_recomputed"] / len(near))
            nbytes.append(exact["told"]["bytes_loaded"])
    row: dict[str, Any] = {"model": model, "tokens": length, "prompts": repeats}
    for name, values in times.items():
        row[f"{name}_ms"] = round(1e3 * statistics.median(values), 2)
        row[f"{name}_spread"] = round(max(values) / min(values), 2)
    for name in ("exact", "blend"):
        ratios = [one / other for one, other in zip(times[name], times["full"], strict=True)]
        row[f"{name}_by_full"] = round(statistics.median(ratios), 4)
    return {**row, "blend_rows": round(statistics.fmean(computed), 4), "bytes": int(statistics.fmean(nbytes))}


def _ask(server: Server, prompt: list[int], wish: dict[str, Any]) -> dict[str, Any]:
    return server.run([prompt], max_tokens=ANSWER, wish=wish)[0]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| model | tokens | full prefill | exact hit | blend | rows of a blend |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{row[f'{name}_ms']:.0f} ms ({row[f'{name}_by_full']:.1%})" for name in ("exact", "blend")]
        lines.append(
            f"| {row['model']} | {row['tokens']:,} | {row['full_ms']:.0f} ms | {cells[0]} | {cells[1]} | {row['blend_rows']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=LARGE, help="may be given more than once; default both")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default {' '.join(map(str, LENGTHS))}")
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length, default 5")
    parser.add_argument("--small", action="store_true", help="tiny models and short prompts, to try the script")
    parser.add_argument("--output", type=Path, help="write the rows here, as JSON")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    given = parser.parse_args()
    lengths: Sequence[int] = given.lengths or (SMALL_LENGTHS if given.small else LENGTHS)
    if given.arm:
        print("RESULT " + json.dumps(measure(given.arm, lengths, given.repeats)))
        return
    rows: list[dict[str, Any]] = []
    for name in given.model or LARGE:
        rows += _in_process(f"{name}-small" if given.small else name, lengths, given.repeats)
        print(table(rows), file=sys.stderr)
    found = {"machine": _named(), "command": " ".join(sys.argv), "rows": rows}
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(rows))


def _in_process(model: str, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", *this_module(), "--arm", model, "--repeats", str(repeats)]
    environment = dict(os.environ) if _has_gpu() else {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([*command, "--lengths", *map(str, lengths)], env=environment, capture_output=True, text=True)
    found = result_in(done.stdout.splitlines())
    if found is None:
        raise SystemExit(f"{model} did not finish:\n{done.stdout[-500:]}\n{done.stderr[-3000:]}")
    return found


def _named() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}; {machine()}" if torch.cuda.is_available() else machine()


if __name__ == "__main__":
    main()

"""What a store without duplicates takes and costs, at SmolLM2's shape (30 layers, 3 KV heads, head_dim 64).

    python benchmarks/store_deltas.py [--turns 40] [--turn-tokens 50] [--others 20] [--repeats 31] [--output deltas.json]

A conversation, each turn of which continues the one before, and other prompts that begin with the same preamble, are stored in
memory and on disk. Printed are the bytes beside those of the distinct (prefix, token) pairs, and how long it takes to store a turn
and to load the last one from all its parts, beside copying the same bytes. All ways take turns in one run; medians are printed
with their 10th and 90th percentile. The page cache is warm, loads are verified, and `memcpy` copies into memory that is there.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from dejakv.identity import exact_key
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.checksum import checksum
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.memory import MemoryStore
from store import machine, measure

LAYERS, HEADS, WIDTH = 30, 3, 64
PREAMBLE = 500
GOAL_BYTES = 1.05
GOAL_LOAD = 2.0


def prompts(turns: int, turn_tokens: int, others: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Token ids: the turns of one conversation, then prompts that share its preamble."""
    rnd = np.random.default_rng(seed)
    preamble = tuple(rnd.integers(0, 49_000, PREAMBLE).tolist())
    talk = tuple(rnd.integers(0, 49_000, turns * turn_tokens).tolist())
    told = [preamble + talk[: (turn + 1) * turn_tokens] for turn in range(turns)]
    return told + [preamble + tuple(rnd.integers(0, 49_000, 4 * turn_tokens).tolist()) for _ in range(others)]


def state_of(tokens: Sequence[int], rows: np.ndarray) -> Chunk:
    """A prompt's state: row i is the same for all prompts, which is enough to be exact for those that share a prefix."""
    meta = ChunkMeta(
        id=exact_key("default", "epoch", tokens, ()),
        partition="default",
        epoch="epoch",
        token_ids=tuple(tokens),
        prompt="x" * 4 * len(tokens),  # about what the text of so many tokens takes
        chunk="x" * 100,
    )
    return Chunk(meta, Tensor(np.ascontiguousarray(rows[:, :, :, : len(tokens)]), "BF16"))


def distinct(told: list[tuple[int, ...]]) -> int:
    """How many (prefix, token) pairs there are."""
    seen: set[int] = set()
    for tokens in told:
        state = 0
        for token in tokens:
            state = hash((state, token))
            seen.add(state)
    return len(seen)


def timed_puts(store: DeltaStore, chunks: list[Chunk]) -> list[float]:
    times: list[float] = []
    for chunk in chunks:
        began = time.perf_counter()
        assert store.put(chunk)
        times.append(1e3 * (time.perf_counter() - began))
    return times


def loads(stores: dict[str, DeltaStore], whole: DiskStore, last: Chunk) -> dict[str, Callable[[], object]]:
    source, target = last.tensor.data, np.empty_like(last.tensor.data)
    id, half = last.meta.id, last.meta.num_tokens // 2

    def read(load: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            assert load() is not None

        return call

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, source),
        "memcpy into new memory": source.copy,
        "checksum alone": lambda: checksum(source),
        "disk, stored whole": read(lambda: whole.get(id)),
    }
    for name, store in stores.items():
        ways[f"{name}, from its parts"] = read(lambda store=store: store.get(id))
        ways[f"{name}, first half of the rows"] = read(lambda store=store: store.get_parts(id, [(0, half)]))
    return ways


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--turn-tokens", type=int, default=50)
    parser.add_argument("--others", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--dir", type=Path, default=None, help="where to put the files (default: a temporary folder)")
    parser.add_argument("--output", type=Path, default=None, help="write the results as JSON")
    options = parser.parse_args()
    told = prompts(options.turns, options.turn_tokens, options.others)
    rows = np.random.default_rng(1).integers(0, 2**16, (2, LAYERS, HEADS, max(map(len, told)), WIDTH), dtype=np.uint16)
    row = 2 * LAYERS * HEADS * WIDTH * 2
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load_average']:.1f}, Python {about['python']}")
    pairs, tokens = distinct(told), sum(map(len, told))
    print(f"{len(told)} prompts of {tokens} tokens, {pairs} distinct (prefix, token) pairs of {row} bytes")
    results: dict[str, object] = {"machine": about, "prompts": len(told), "tokens": tokens, "pairs": pairs}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        stores = {"memory": DeltaStore(MemoryStore()), "disk": DeltaStore(DiskStore(Path(folder) / "deltas"))}
        for name, store in stores.items():
            times = timed_puts(store, [state_of(ids, rows) for ids in told])
            held = store.stats().bytes
            results[f"{name} bytes"], results[f"{name} put ms"] = held, times
            print(
                f"{name:7s} {held / 2**20:8.1f} MiB, {held / (pairs * row):.3f} x the distinct pairs (goal {GOAL_BYTES}),"
                f" {held / (tokens * row):.3f} x what prompts stored whole take; a put takes {np.median(times):.1f} ms"
            )
        last = state_of(told[options.turns - 1], rows)
        with closing(DiskStore(Path(folder) / "whole")) as whole:
            assert whole.put(last)
            loaded = measure(loads(stores, whole, last), options.repeats)
        for store in stores.values():
            store.close()
    results["load"] = loaded
    base = loaded["memcpy"]["median_ms"]
    print(f"loading {last.tensor.nbytes / 2**20:.1f} MiB, {options.repeats} turns:")
    for name, found in loaded.items():
        spread = f"({found['p10_ms']:.2f} to {found['p90_ms']:.2f})"
        print(f"{name:32s} {found['median_ms']:8.2f} ms  {spread:18s} {found['median_ms'] / base:6.2f} x memcpy")
    ratio = loaded["disk, from its parts"]["median_ms"] / base
    print(
        f"goal: a load from {options.turns} parts within {GOAL_LOAD:g} x memcpy: {'met' if ratio <= GOAL_LOAD else 'missed'}"
    )
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

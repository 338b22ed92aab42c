"""What a store costs: opening, lookups, memory and bytes with many prompts, and the load of a conversation of 40 parts.

python research/store.py --entries 100000
"""

import argparse
import resource
import tempfile
import time

import numpy as np

from dejakv.identity import exact_key
from dejakv.store import Store, open_store
from dejakv.store.base import Chunk, ChunkMeta, Tensor


def prompt(tokens: list[int], width: int, heads: int = 1, layers: int = 1) -> Chunk:
    ids = tuple(tokens)
    meta = ChunkMeta(exact_key("p", "e", ids, ()), "p", "e", ids, "", "")
    return Chunk(meta, Tensor(np.zeros((2, layers, heads, len(ids), width), np.float32), "F32"))


def memory() -> float:
    """MiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def many(folder: str, entries: int) -> None:
    """Opening, lookups and memory with so many prompts of 256 tokens."""
    store = open_store(folder)
    began = time.perf_counter()
    for number in range(entries):
        store.put(prompt([number, *range(255)], 1))
    print(f"put {entries}: {time.perf_counter() - began:.1f} s")
    store.close()
    before, began = memory(), time.perf_counter()
    store = open_store(folder)
    found = store.find("p", "e", [entries // 2, *range(255), 7])
    print(f"open and first lookup: {time.perf_counter() - began:.2f} s, {found is not None}")
    began = time.perf_counter()
    for number in range(0, entries, max(1, entries // 1000)):
        store.find("p", "e", [number, *range(255), 7])
    print(f"lookup: {time.perf_counter() - began:.3f} ms, memory {memory() - before:.1f} MiB")
    store.close()


def conversation(store: Store) -> None:
    """550 tokens and 39 turns of 50, in the shape of SmolLM2: bytes stored and the load as held, in copies of the same bytes."""
    tokens = list(range(550))
    distinct = 0
    for turn in range(40):
        chunk = prompt(tokens, 64, 3, 30)
        assert store.put(chunk)
        distinct = chunk.tensor.nbytes
        tokens = [*tokens, *range(1000 * turn + 1000, 1000 * turn + 1050)]
    print(f"bytes stored: {store.stats().bytes / distinct:.4f} of the distinct ones")
    source = np.ones(distinct, np.uint8)
    target = np.empty_like(source)
    for name in ("first", "second", "third"):
        began = time.perf_counter()
        target[:] = source
        copied = time.perf_counter() - began
        began = time.perf_counter()
        parts = store.get_parts(chunk.meta.id)
        taken = time.perf_counter() - began
        print(f"{name} load of {len(parts or ())} parts: {taken / copied:.2f} copies")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        many(f"{folder}/many", options.entries)
        with_turns = open_store(f"{folder}/turns")
        conversation(with_turns)
        with_turns.close()


if __name__ == "__main__":
    main()

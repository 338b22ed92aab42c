"""What a store costs: opening, lookups, levels and memory over many prompts.

Beside these stand bytes and load of a conversation of 40 parts.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.finder import space_of
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.latent import EmbeddingCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import ReuseRequest
from dejakv.engines.base import Prepared
from dejakv.identity import exact_key
from dejakv.request import Request
from dejakv.store import open_store
from dejakv.store.base import RawTensor, StateInfo, StoredState
from dejakv.vectors.base import Vector
from dejakv.vectors.spaces import LayerSpec
from research.machine import machine, spread, versions

Row = dict[str, Any]
TOKENS, TEXT, VISION = 256, 384, 512


class NoEncoder:
    """Vectors are stored: what encoding takes is not measured."""

    fingerprint, dim = "none", TEXT

    def encode(self, text: str) -> Vector:
        return unit(len(text), TEXT)


def unit(seed: int, dim: int) -> Vector:
    row = np.random.default_rng(seed).standard_normal(dim, dtype=np.float32)
    return row / np.linalg.norm(row)


def prompt(number: int) -> Prepared:
    tokens = np.random.default_rng(number).integers(0, 49_152, TOKENS)
    text = f"What is said about subject {number}, and where?"
    return Prepared(Request("r", text, text, partition="p"), tuple(tokens.tolist()), epoch="e")


def stored_state(
    token_ids: Sequence[int], shape: tuple[int, int, int], **about: Any
) -> StoredState:
    """Zeros as the state `[2, layers, heads, tokens, dim]` of a prompt."""
    layers, heads, dim = shape
    ids = tuple(token_ids)
    meta = StateInfo(
        exact_key("p", "e", ids, ()), "p", "e", ids, **{"prompt": "", "chunk": "", **about}
    )
    return StoredState(
        meta, RawTensor(np.zeros((2, layers, heads, len(ids), dim), np.float32), "F32")
    )


def put_many(folder: str, entries: int) -> None:
    store = open_store(folder)
    # What is put is made up, so nothing is lost with it.
    with mock.patch.object(os, "fsync"):
        for number in range(store.stats().entries, entries):
            item = prompt(number)
            text = item.request.prompt
            vectors = {"text": unit(number, TEXT), "vision": unit(-number % 2**32, VISION)}
            about = {"prompt": text, "chunk": text, "space": space_of(item, "exact")}
            store.put(
                stored_state(item.token_ids, (1, 1, 1), vectors=vectors, embedder="e", **about)
            )
    store.close()


def resident() -> float:
    """MiB of this process's own memory, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def opened(folder: str, entries: int) -> Row:
    """The time to the first exact hit, lookups, and the memory that they take."""
    asked = [
        prompt(number)
        for number in np.random.default_rng(entries).integers(0, entries, 1000).tolist()
    ]
    before, began = resident(), time.perf_counter()
    store = open_store(folder)
    ready = time.perf_counter() - began
    found = store.find("p", "e", (*asked[0].token_ids, 1))
    first = time.perf_counter() - began
    assert found is not None
    assert found[0].tokens == TOKENS
    spent: list[float] = []
    for item in asked:
        began = time.perf_counter()
        store.find("p", "e", (*item.token_ids, 1))
        spent.append(1000 * (time.perf_counter() - began))
    row = {
        "open_s": ready,
        "first_hit_s": first,
        "memory_mib": resident() - before,
        "find_ms": spread_and_maximum(spent),
    }
    store.close()
    return row


def filled(folder: str, entries: int) -> Row:
    """Measure until every level and copied text find all prompts.

    Exact lookups are measured meanwhile, and afterwards.
    """
    rng = np.random.default_rng(entries)
    asked = [prompt(number) for number in rng.integers(0, entries, 1000).tolist()]
    levels = [
        ExactTextCache(),
        EmbeddingCache([LayerSpec("vision", VISION, 0.8)]),
        SemanticTextCache(NoEncoder(), 0.8),
    ]
    config = SemanticCacheConfig(reuse="blend")
    began, worked = time.perf_counter(), time.process_time()
    cache = HierarchicalCache(open_store(folder), levels, config=config, embedder="e")
    done = threading.Event()
    took: list[float] = []

    def wait() -> None:
        cache.flush()
        took.extend((time.perf_counter() - began, time.process_time() - worked))
        done.set()

    threading.Thread(target=wait).start()
    meanwhile: list[float] = []
    while not done.is_set():
        at = time.perf_counter()
        assert (
            cache.find(asked[len(meanwhile) % 1000], ReuseRequest("exact")).plan.method == "exact"
        )
        meanwhile.append(1000 * (time.perf_counter() - at))
        time.sleep(0.02)
    after: list[float] = []
    for item in asked[:200]:
        at = time.perf_counter()
        cache.find(item, ReuseRequest("exact"))
        after.append(1000 * (time.perf_counter() - at))
    held = [len(level) for level in levels]
    cache.close()
    return {
        "filled_s": took[0],
        "filled_cpu_s": took[1],
        "levels": held,
        "find_meanwhile_ms": spread_and_maximum(meanwhile),
        "find_after_ms": spread_and_maximum(after),
    }


def loads(folder: str, ids: Sequence[int], nbytes: int, times: int) -> Row:
    """Measure lookup and load of a prompt as it is stored, in copies of its bytes.

    One process verifies, and another has verified.
    """
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    verified: list[float] = []
    again: list[float] = []
    parts = 0
    for _ in range(times):
        store = open_store(folder)
        for ratios in (verified, again):
            began = time.perf_counter()
            target[:] = source
            copied = time.perf_counter() - began
            began = time.perf_counter()
            found = store.find("p", "e", ids, whole=True)
            held = store.get_parts(found[0].donor) if found is not None else None
            ratios.append((time.perf_counter() - began) / copied)
            assert held is not None
            parts = len(held)
            del held
        store.close()
    return {
        "segments": parts,
        "verified_copies": spread_and_maximum(verified),
        "again_copies": spread_and_maximum(again),
    }


def conversation(folder: str, times: int) -> Row:
    """Measure 550 tokens and 39 turns of 50, in the shape of SmolLM2, float32.

    The shape has 30 layers and 3 heads of 64.
    """
    tokens, distinct = list(range(550)), 0
    store = open_store(folder)
    for turn in range(40):
        made = stored_state(tokens, (30, 3, 64))
        assert store.put(made)
        distinct = made.tensor.nbytes
        last, tokens = tokens, [*tokens, *range(1000 * turn + 1000, 1000 * turn + 1050)]
    row = {"mib": distinct / 2**20, "bytes_ratio": store.stats().bytes / distinct}
    store.close()
    return row | alone(loads, folder, last, distinct, times)


def alone(measure: Callable[..., Row], *given: Any) -> Row:
    """Measure in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, *given).result()


def spread_and_maximum(values: Sequence[float]) -> Row:
    return {**spread(values), "max": float(max(values))}


def together(rows: Sequence[Row]) -> Row:
    """Return the spread of several runs' figures.

    Of spreads it returns their medians, with the largest maximum.
    """
    made: Row = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(first, dict):
            made[name] = {
                key: float((max if key == "max" else np.median)([v[key] for v in values]))
                for key in first
            }
        else:
            made[name] = first if isinstance(first, list) else spread_and_maximum(values)
    return made


def text(value: Any) -> str:
    if isinstance(value, dict):
        return (
            f"{value['p50']:.3g} ({value['p10']:.3g} to {value['p90']:.3g}; at most"
            f" {value['max']:.3g})"
        )
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--folder", help="for the prompts; by default a temporary one")
    parser.add_argument("--openings", type=int, default=5)
    parser.add_argument("--fillings", type=int, default=2)
    parser.add_argument("--loads", type=int, default=21)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result: Row = {
        "command": f"python -m research.store {' '.join(sys.argv[1:])}",
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or f"{temporary}/many"
        put_many(folder, given.entries)
        entries = given.entries
        result["exact"] = together([alone(opened, folder, entries) for _ in range(given.openings)])
        result["levels"] = together([alone(filled, folder, entries) for _ in range(given.fillings)])
        result["conversation"] = conversation(f"{temporary}/turns", given.loads)
    result |= {"entries": entries, "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    for part in ("exact", "levels", "conversation"):
        for name, value in result[part].items():
            print(f"| {part}: {name} | {text(value)} |")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

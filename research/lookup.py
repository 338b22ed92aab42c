"""How long a look-up takes: exact, semantic (without the encoder) and latent.

FAISS alone and GPTCache are measured beside it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from dejakv.decide.levels.base import Query
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.latent import EmbeddingCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.request import Request
from dejakv.vectors.base import Vector
from dejakv.vectors.hnsw import HNSWIndex
from dejakv.vectors.spaces import LayerSpec
from research.machine import machine, versions

Row = dict[str, Any]

DIM, VISION_DIM = 384, 512
INNER = 48
BATCH = 10_000


class Space:
    """Source of synthetic vectors: equal numbers give equal vectors, whatever the size."""

    def __init__(self, dim: int, seed: int) -> None:
        self.dim, self.seed = dim, seed
        self.basis = np.random.default_rng(seed).standard_normal(
            (INNER, dim), dtype=np.float32
        ) / np.sqrt(dim)

    def batch(self, number: int, size: int) -> Vector:
        rng = np.random.default_rng((self.seed, number))
        rows = rng.standard_normal((size, INNER), dtype=np.float32) @ self.basis
        rows += 0.05 * rng.standard_normal((size, self.dim), dtype=np.float32)
        return unit_rows(rows)

    def batches(self, count: int) -> Iterator[tuple[int, Vector]]:
        for start in range(0, count, BATCH):
            yield start, self.batch(start // BATCH, min(BATCH, count - start))

    def queries(self, count: int, asked: int) -> tuple[list[int], Vector]:
        """Return rows of stored vectors at a cosine of about 0.9, and which those are."""
        rng = np.random.default_rng((self.seed, 999_999))
        held = self.batch(0, min(BATCH, count))
        places = rng.choice(len(held), min(asked, len(held)), replace=False)
        noise = unit_rows(rng.standard_normal((len(places), INNER), dtype=np.float32) @ self.basis)
        return places.tolist(), unit_rows(held[places] + 0.48 * noise)


def unit_rows(rows: Vector) -> Vector:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| look-up | entries | best µs | p50 µs | p99 µs | recall@1 | add µs |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        recall = f"{row['recall_at_1']:.3f}" if "recall_at_1" in row else ""
        added = f"{row['add_us']:.1f}" if "add_us" in row else ""
        lines.append(
            f"| {row['what']} | {row['entries']:,} | {row['best_us']:,.1f} | {row['p50_us']:,.1f} |"
            f" {row['p99_us']:,.1f} | {recall} | {added} |"
        )
    return "\n".join(lines)


def in_turns(calls: dict[str, Callable[[int], Any]], times: int) -> dict[str, Row]:
    """Time each call with the numbers 0..times-1, in turns, after a warm-up.

    The figures are the best, p50 and p99 in microseconds.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for number in range(3):
            call(number)
    for number in range(times):
        for name, call in calls.items():
            began = time.perf_counter()
            call(number)
            spent[name].append(time.perf_counter() - began)
    return {
        name: {
            f"{what}_us": float(np.percentile(s, share) * 1e6)
            for what, share in (("best", 0), ("p50", 50), ("p99", 99))
        }
        for name, s in spent.items()
    }


def exact(count: int, times: int) -> Iterator[Row]:
    cache = ExactTextCache()
    for number in range(count):
        cache.record(
            f"What is the color of thing number {number} in the picture?",
            f"chunk{number:036d}",
            "space",
        )
    rng = np.random.default_rng(0)
    texts = [
        f"what is the  color of thing number {n} in the picture?"
        for n in rng.integers(0, count, times).tolist()
    ]
    hits = [Query(Request("r", "", text), "space") for text in texts]
    misses = [Query(Request("r", "", f"{text} now"), "space") for text in texts]
    assert all(cache.search(query).matches for query in hits)
    assert not any(cache.search(query).matches for query in misses)
    result = in_turns(
        {"hit": lambda i: cache.search(hits[i]), "miss": lambda i: cache.search(misses[i])}, times
    )
    for name, row in result.items():
        yield {"what": f"exact, {name}", "entries": count, **row}


def semantic(count: int, times: int, kinds: Sequence[str], gptcache_up_to: int) -> Iterator[Row]:
    space = Space(DIM, 1)
    levels = {kind: SemanticTextCache(NoEncoder(), 0.8, index=kind) for kind in kinds}
    raw = faiss.IndexFlatIP(DIM)
    built = dict.fromkeys(kinds, 0.0)
    for start, rows in space.batches(count):
        raw.add(rows)
        for kind, level in levels.items():
            began = time.perf_counter()
            for place, row in enumerate(rows, start):
                level.add(str(place), "", row)
            built[kind] += time.perf_counter() - began
    _, queries = space.queries(count, times)
    times = len(queries)
    truth = raw.search(queries, 1)[1][:, 0].tolist()
    calls: dict[str, Callable[[int], Any]] = {
        "raw FAISS, k=8": lambda i: raw.search(queries[i : i + 1], 8)
    }
    for kind, level in levels.items():
        calls[f"semantic, {kind}"] = lambda i, level=level: level.search_vector(queries[i])
    # Each way of searching on its own where it differs in kind: a scan of everything leaves a graph
    # with cold caches.
    graph = {name: call for name, call in calls.items() if name == "semantic, hnsw"}
    result = in_turns({name: call for name, call in calls.items() if name not in graph}, times)
    if graph:
        result |= in_turns(graph, times)
    gptcache = _gptcache(space, count) if count <= gptcache_up_to else None
    if gptcache is not None:
        result |= in_turns({"GPTCache": lambda i: gptcache(queries[i])}, min(times, 200))
    for name, row in result.items():
        found = {"what": name, "entries": count, **row}
        kind = name.removeprefix("semantic, ")
        if kind in levels:
            best = [levels[kind].search_vector(query) for query in queries]
            agreed = [bool(m) and int(m[0].donor) == t for m, t in zip(best, truth, strict=True)]
            found["recall_at_1"] = float(np.mean(agreed))
            found["add_us"] = built[kind] / count * 1e6
        yield found


def hnsw_breadth(count: int, recall: float) -> Iterator[Row]:
    """Yield what a higher recall costs.

    The breadth that reaches it on one half of the queries is measured on the other half.
    """
    space, index = Space(DIM, 1), HNSWIndex(DIM)
    raw = faiss.IndexFlatIP(DIM)
    for start, rows in space.batches(count):
        raw.add(rows)
        for place, row in enumerate(rows, start):
            index.add(str(place), row)
    _, queries = space.queries(count, 1000)

    def found(asked: Any) -> list[bool]:
        truth = raw.search(asked, 1)[1][:, 0].tolist()
        return [
            int(index.search(query, 1)[0][0]) == place
            for query, place in zip(asked, truth, strict=True)
        ]

    while np.mean(found(queries[::2])) < recall and index.breadth < 4096:
        index.breadth *= 2
    rest = queries[1::2]
    row = in_turns({"x": lambda i: index.search(rest[i], 1)}, len(rest))["x"]
    what = f"HNSW alone, tuned to recall {recall} (breadth {index.breadth})"
    yield {"what": what, "entries": count, **row, "recall_at_1": float(np.mean(found(rest)))}


def latent(count: int, times: int) -> Iterator[Row]:
    prompt, vision = Space(DIM, 1), Space(VISION_DIM, 2)
    level = EmbeddingCache([LayerSpec("prompt", DIM, 0.8), LayerSpec("vision", VISION_DIM, 0.8)])
    raw = {"prompt": faiss.IndexFlatIP(DIM), "vision": faiss.IndexFlatIP(VISION_DIM)}
    for (start, p_rows), (_, v_rows) in zip(
        prompt.batches(count), vision.batches(count), strict=True
    ):
        raw["prompt"].add(p_rows)
        raw["vision"].add(v_rows)
        for place, (p_row, v_row) in enumerate(zip(p_rows, v_rows, strict=True), start):
            level.add(str(place), {"prompt": p_row, "vision": v_row})
    places, p_queries = prompt.queries(count, times)
    v_queries = np.stack([vision.batch(0, min(BATCH, count))[place] for place in places])
    found = [
        level.search({"prompt": p, "vision": v}) for p, v in zip(p_queries, v_queries, strict=True)
    ]
    hits = float(
        np.mean(
            [
                m is not None and int(m.donor) == place
                for m, place in zip(found, places, strict=True)
            ]
        )
    )
    calls: dict[str, Callable[[int], Any]] = {
        "raw FAISS, one layer (384), k=32": (
            lambda i: raw["prompt"].search(p_queries[i : i + 1], 32)
        ),
        "raw FAISS, both layers (384 + 512), k=32": lambda i: (
            raw["prompt"].search(p_queries[i : i + 1], 32),
            raw["vision"].search(v_queries[i : i + 1], 32),
        ),
        "latent, all of 384 + 512": lambda i: level.search(
            {"prompt": p_queries[i], "vision": v_queries[i]}
        ),
    }
    for name, row in in_turns(calls, len(places)).items():
        extra = {"recall_at_1": hits} if name.startswith("latent") else {}
        yield {"what": name, "entries": count, **row, **extra}


class NoEncoder:
    """Encoder for vectors that are stored: its time is not measured here."""

    fingerprint, dim = "none", DIM

    def encode(self, text: str) -> Vector:
        raise NotImplementedError("vectors are given in this benchmark")


def _gptcache(space: Space, count: int) -> Callable[[Vector], Any] | None:
    """One look-up of GPTCache over the same vectors; None where it is not installed."""
    try:
        from gptcache.manager import manager_factory
        from gptcache.similarity_evaluation.distance import SearchDistanceEvaluation
    except ImportError:
        print("GPTCache is not installed: its rows are left out", file=sys.stderr)
        return None
    folder = tempfile.mkdtemp(prefix="gptcache-")
    manager = manager_factory(
        "sqlite,faiss", data_dir=folder, max_size=count + 1, vector_params={"dimension": DIM}
    )
    for start, rows in space.batches(count):
        names = [f"question {start + i}" for i in range(len(rows))]
        manager.import_data(names, names, list(rows), [None] * len(rows))
    evaluation = SearchDistanceEvaluation(max_distance=2.0)

    def look_up(vector: Vector) -> list[float]:
        ranks: list[float] = []
        for found in manager.search(vector):
            data = manager.get_scalar_data(found)
            ranks.append(
                evaluation.evaluation(
                    {"question": ""}, {"question": data.question, "search_result": found}
                )
            )
        return ranks

    return look_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1000,100000,1000000")
    parser.add_argument(
        "--hnsw-up-to",
        type=int,
        default=100_000,
        help="a graph takes about 0.2 ms an entry to build",
    )
    parser.add_argument(
        "--gptcache-up-to", type=int, default=100_000, help="it takes about 1 ms an entry to fill"
    )
    parser.add_argument("--latent-up-to", type=int, default=1_000_000)
    parser.add_argument(
        "--times",
        type=int,
        default=1000,
        help="look-ups measured (a third of it above 10,000 entries, a tenth above 100,000)",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="also what a recall of 0.99 costs; builds the graph once more",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    faiss.omp_set_num_threads(1)
    rows: list[Row] = []
    began = machine()
    for size in map(int, args.sizes.split(",")):
        times = args.times // (1 if size <= 10_000 else 3 if size <= 100_000 else 10)
        rows += exact(size, args.times)
        rows += semantic(
            size,
            times,
            ["flat", "hnsw"] if size <= args.hnsw_up_to else ["flat"],
            args.gptcache_up_to,
        )
        if args.tune and 10_000 < size <= args.hnsw_up_to:
            rows += hnsw_breadth(size, 0.99)
        if size <= args.latent_up_to:
            rows += latent(size, times)
        print(f"{size:,} entries done", file=sys.stderr)
        if args.json:  # after every size: a run that is stopped has told what it knew
            args.json.write_text(
                json.dumps({"machine": began, "versions": versions(), "rows": rows}, indent=1)
                + "\n"
            )
    print(table(rows), json.dumps(began), sep="\n")


if __name__ == "__main__":
    main()

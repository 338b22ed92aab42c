"""Arithmetic, with measured costs, of a prefix whose end is read from a bucket while its beginning is computed: `python -m
research.many_machines.partial`. Both ways meet where they are done at once; that computing and reading do not slow each other is assumed."""

import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from dejakv.decide.costs import Costs
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.identity import exact_key
from dejakv.request import Request, Sampling
from dejakv.store import open_store
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from research.many_machines.services import Services, services

TOKENS, MEASURED, REPEATS = 2048, 512, 7
MODEL = "smollm2-135m"


def read_seconds(running: Services, token_bytes: int) -> float:
    """Seconds to read so many tokens' state from the S3 server, the median."""
    shape = (2, 1, 1, TOKENS, token_bytes // 8)
    state = Tensor(np.random.default_rng(0).standard_normal(shape, np.float32), "F32")
    ids, place = tuple(range(TOKENS)), running.place()
    meta = ChunkMeta(exact_key("p", "e", ids, []), "p", "e", ids, "", "")
    with closing(open_store(place, background=False)) as store:
        assert store.put(Chunk(meta, state))
        took = list[float]()
        for _ in range(REPEATS):
            began = time.perf_counter()
            assert store.get_parts(meta.id) is not None
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def costs_here() -> Costs:
    """Of the model, from prefills in full: the best of some, since what else the machine does makes them slower."""
    engine = TransformersEngine.from_pretrained(MODEL, dtype="fp32")
    words = engine.tokenizer.decode(list(range(1000, 1000 + MEASURED)))
    prepared = engine.prepare(Request("r", words, words, sampling=Sampling(1)))
    took = min(engine.full(prepared).ttft_s for _ in range(3))
    shape = engine.costs(timed=False)
    factor = took / shape.full(len(prepared.token_ids))
    return replace(shape, row=shape.row * factor, pair=shape.pair * factor)


def together(costs: Costs, read: float, tokens: int = TOKENS) -> tuple[float, float]:
    """Seconds with the better of computing and reading all, and where they meet in the middle."""
    both = (max(costs.full(held), read * (1 - held / tokens)) for held in range(tokens + 1))
    return min(costs.full(tokens), read), min(both)


def main() -> None:
    costs = costs_here()
    with tempfile.TemporaryDirectory() as folder, services(Path(folder)) as running:
        here = read_seconds(running, int(costs.token_bytes))
    nbytes = TOKENS * costs.token_bytes
    print(
        f"{TOKENS} tokens, {nbytes / 1e6:.0f} MB; computed in {costs.full(TOKENS):.2f} s; read from S3 here in {here:.3f} s"
    )
    print("| bandwidth | read | better of both | meeting | saved |\n|---|---|---|---|---|")
    for name, read in [
        (f"here, {nbytes / here / 1e6:.0f} MB/s", here),
        *((f"{megabytes} MB/s", 0.02 + nbytes / megabytes / 1e6) for megabytes in (1000, 300, 100, 30, 12, 4)),
    ]:
        best, meeting = together(costs, read)
        print(f"| {name} | {read:.2f} s | {best:.2f} s | {meeting:.2f} s | {1 - meeting / best:.0%} |")


if __name__ == "__main__":
    main()

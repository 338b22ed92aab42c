"""What a large store costs the connector: lookups, the search for other processes' prompts, and the engine loop's part of a save.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_loop.py [--prompts 10000] [--json FILE]

No engine runs: the scheduler side's parts are driven as it drives them, over a store on disk whose prompts have 4,000 tokens, the
first 2,000 of them one of 20 preambles, and whose state is tiny. Blend is allowed, so that copied text is indexed too. Lookups are
timed within their thread, by the clock; the engine loop's part is what the call takes that confirms a save. "decoded" is what the
search for new prompts did before (every description in the catalog).
Goals, at 10,000 prompts: a lookup in 1 ms, the search in proportion to what is new, 100 microseconds for a confirmed save.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dejakv.cache import HierarchicalCache
from dejakv.engines.vllm.adapters import Adapters
from dejakv.engines.vllm.counts import Counts
from dejakv.engines.vllm.generations import Generations
from dejakv.engines.vllm.lookups import Lookups
from dejakv.engines.vllm.saves import Saves
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.identity import exact_key
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.disk import DiskStore

TOKENS, PREAMBLES, NEW = 4_000, 20, 20
GOALS = {"lookup_ms": 1.0, "confirm_us": 100.0}
ROOM = Tensor(np.zeros((2, 1, 1, 1, 1), np.float32), "F32")


def draw(seed: int, count: int) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, 50_000, count).tolist())


class Prompts:
    """Prompt number i: one of the preambles and tokens of its own."""

    def __init__(self) -> None:
        self._preambles = [draw(seed, TOKENS // 2) for seed in range(PREAMBLES)]

    def __getitem__(self, number: int) -> tuple[int, ...]:
        return self._preambles[number % PREAMBLES] + draw(1_000 + number, TOKENS // 2)


def asked(token_ids: Sequence[int]) -> Any:
    """A request as vLLM's scheduler has it."""
    return SimpleNamespace(
        request_id="r", prompt_token_ids=list(token_ids), cache_salt=None, mm_features=[], lora_request=None
    )


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p95": ordered[int(0.95 * (len(ordered) - 1))], "n": len(ordered)}


def looked_up(lookups: Lookups, prompts: list[tuple[int, ...]], mode: str) -> dict[str, Any]:
    found = [lookups.submit(asked(prompt), Wish(mode)).answer.result(60) for prompt in prompts]  # pyright: ignore
    return {"found": found[0].level or "nothing", **spread([1_000 * one.seconds for one in found])}


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = ConnectorSettings(
            modes=("off", "exact", "blend"), store_dir=f"{folder}/kv", refresh_s=0.0, max_bytes=0
        )
        prompts, theirs = Prompts(), DiskStore(settings.store_dir or "")
        described = ChunkMeta("", "default", "e", (), "", "")

        def put(number: int) -> ChunkMeta:
            ids = prompts[number]
            key = exact_key("default", "e", ids, ())
            meta = replace(described, id=key, token_ids=ids, created=float(number))
            assert theirs.put(Chunk(meta, ROOM))
            return meta

        for number in range(count):
            put(number)
        store = DiskStore(settings.store_dir or "")
        began = time.perf_counter()
        cache = HierarchicalCache(store, config=settings.cache_config())
        lookups = Lookups(cache, settings, Adapters("e", {}, "", False))
        start_s = time.perf_counter() - began
        rng = random.Random(0)
        some = [prompts[rng.randrange(count)] for _ in range(50)]
        behind = [prompt[: TOKENS // 2] + draw(9_000_000 + i, TOKENS // 2) for i, prompt in enumerate(some)]
        moved = [draw(8_000_000 + i, 50) + prompt[TOKENS // 4 :] for i, prompt in enumerate(some)]
        fresh = [draw(7_000_000 + i, TOKENS) for i in range(50)]
        found = {
            f"{name}, {mode}": looked_up(lookups, asked_for, mode)
            for mode in ("exact", "blend")
            for name, asked_for in {"stored": some, "preamble": behind, "moved": moved, "new": fresh}.items()
        }
        decoded = [timed(lambda: list(store.metas())) for _ in range(3)]
        _, mark = store.added()
        idle = [timed(lambda: store.added(mark)) for _ in range(20)]
        new = [put(count + number) for number in range(NEW)]
        some_new = [timed(lambda: store.added(mark)) for _ in range(20)]
        saves = Saves(lookups, Counts(), Generations("e", 1), 1)
        saves.pending.update({meta.id: meta for meta in new})
        confirmed = [timed(lambda meta=meta: saves.heard(meta.id, "")) for meta in new]
        last = lookups.index.last
        assert last is not None
        last.result(60)
        lookups.close()
        theirs.close()
    return {
        "prompts": count,
        "start_s": start_s,
        "lookup_ms": found,
        "search_ms": {
            "decoded": spread([1_000 * value for value in decoded]),
            "nothing new": spread([1_000 * value for value in idle]),
            f"{NEW} new": spread([1_000 * value for value in some_new]),
        },
        "confirm_us": spread([1e6 * value for value in confirmed]),
        "goals": GOALS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = json.dumps(measure(args.prompts), indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

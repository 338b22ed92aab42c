"""Engines of two tensor-parallel ranks on the CPU, and what each rank's store holds."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.reliability.crash_program import rows_and_files

from dejakv.store.base import StoredState
from dejakv.store.open import open_store

RANKS = ("tp-0-of-2", "tp-1-of-2")
ONE: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **ONE}


def of_two_cpus() -> dict[str, str]:
    """Environment: on the CPU backend each rank wants cores of its own, and starts are short without the warm-up."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{others[0] if others else first}", "VLLM_CPU_CI_ENV": "1"}


def use_two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for engines that this process starts."""
    for name, value in of_two_cpus().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # it would go before `kv_cache_memory_bytes`


def confirmed(engine: Any) -> None:
    """Steps the engine until all ranks have answered for every save, and no blocks wait for one."""
    while engine.connector.scheduler_side.saves.pending:
        engine.ask([[9, 9, 9, 9]], max_tokens=2)  # a step carries the confirmation
    while engine.core.scheduler.has_requests():
        engine.llm.llm_engine.step()  # a step of the core alone would lose its statistics


def chunk_of(store: Path | str, rank: str, prompt: list[int]) -> tuple[str, StoredState]:
    """The name of a prompt's first object in one rank's store, and its chunk."""
    opened = open_store(f"{store}/{rank}")
    try:
        (meta,) = [meta for meta in opened.metas() if list(meta.token_ids) == prompt]
        found, record = opened.get(meta.id), opened._catalog.record(meta.id, time.time())
        assert found is not None
        assert record is not None
        return opened._catalog.pieces(record.n)[0].name, found
    finally:
        opened.close()


def held(store: Path, prompt: list[int]) -> list[bool]:
    """Of each rank, whether its store has the prompt, whole and readable."""
    found: list[bool] = []
    for rank in RANKS:
        deltas = open_store(store / rank)
        ids = [meta.id for meta in deltas.metas() if list(meta.token_ids) == prompt]
        found.append(bool(ids) and all(deltas.get(id) is not None for id in ids))
        deltas.close()
    return found


def leftovers(store: Path) -> list[str]:
    """What lies in the ranks' folders and belongs to no entry, once a store was opened on each; and entries without a file."""
    found: list[str] = []
    for rank in RANKS:
        open_store(store / rank).close()
        rows, files = rows_and_files(store / rank)
        found += [f"{rank}/{name}" for name, _ in rows.items() ^ files.items()]
        found += [f"{rank}/temporary/{path.name}" for path in (store / rank / "temporary").iterdir()]
    return found

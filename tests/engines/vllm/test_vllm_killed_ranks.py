"""One of two ranks is killed: vLLM ends and leaves no process, and the next start on the folder has what both ranks had stored."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from vllm_harness import (
    EXTENSION,
    ONE,
    TWO,
    Output,
    confirmed,
    forkserver_id,
    held,
    leftovers,
    of_two_cpus,
    running,
    server_flags,
    serving,
    tokens,
    use_two_cpus,
)
from workers import DYING, Death

from dejakv.request import DEFAULT_PARTITION

A, B, SHORT = (tokens(261, seed) for seed in (81, 82, 83))
LONG = tokens(700, 84)
MOVED = tokens(12, 91) + A[120:240] + tokens(10, 92) + A[20:130]

HIT, MISS = "exact_text", "no stored prompt begins like this one"
ENDED = (RuntimeError, AssertionError)
"""What an engine in this process raises; the second where its workers are gone before the step."""
SERVER_ENDED = (httpx.HTTPStatusError, httpx.NetworkError, httpx.RemoteProtocolError)
"""What a client gets: an answer with an error, or none; no wait without an end."""

OFF, LOOK = {"mode": "off", "no_store": True}, {"no_store": True}
BLEND = {"mode": "blend", "no_store": True}


@pytest.fixture(autouse=True)
def _two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use_two_cpus(monkeypatch)


@contextlib.contextmanager
def _dying(death: Death, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]) -> Iterator[Any]:
    """An engine of which one rank dies."""
    for name, value in death.environment.items():
        monkeypatch.setenv(name, value)
    with running(extra=extra, worker_extension_cls=DYING, **TWO) as engine:
        yield engine


def _ends(death: Death, ask: Callable[[], object], *error: type[Exception]) -> None:
    """Asks until vLLM ends with one of these errors; none of its processes is left."""
    above = {os.getpid(), *(process.pid for process in psutil.Process().parents()), forkserver_id()}
    workers = [psutil.Process(id) for id in death.workers()]
    assert len(workers) == 2
    theirs = {process for worker in workers for process in (worker, *worker.parents()) if process.pid not in above}
    with pytest.raises(error):
        _again_and_again(ask)
    assert death.came, "it ended of something else"
    _, left = psutil.wait_procs(theirs, timeout=None)
    assert not left


def _again_and_again(ask: Callable[[], object]) -> None:
    while True:
        ask()


def test_a_rank_killed_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What both ranks had stored is a hit, be it an increment of a prompt; the rest is computed, and is stored when it comes again."""
    store = tmp_path / "store"
    extra = {"store_dir": str(store), "memory_bytes": 0, "load_timeout_s": 60, "min_new_tokens": 1}

    def as_before(outputs: list[Output]) -> list[str]:
        assert [output.tokens for output in outputs] == truth
        return [output.told["level"] or output.told["reason"] for output in outputs]

    death = Death.in_folder(tmp_path / "published", 1, "published", 2)
    with _dying(death, monkeypatch, extra) as engine:
        truth = [output.tokens for output in engine.ask([A, SHORT, LONG], wish=OFF, salt="truth")]
        engine.ask([A])
        confirmed(engine)
        _ends(death, lambda: engine.ask([SHORT], max_tokens=20), *ENDED)
    assert [held(store, prompt) for prompt in (A, SHORT)] == [[True, True], [True, False]]
    assert not leftovers(store)

    with running(extra=extra, **TWO) as engine:
        first, second, third = as_before(engine.ask([A, SHORT, LONG], wish=LOOK))
        assert (first, third) == (HIT, MISS)
        assert second in (MISS, "prefix")
        engine.reset_prefix_cache()
        engine.ask([SHORT, LONG])
        confirmed(engine)
        engine.reset_prefix_cache()
        assert as_before(engine.ask([A, SHORT, LONG], wish=LOOK)) == [HIT, HIT, HIT]
        metrics = engine.metrics()
    assert (metrics["vllm:dejakv_saves"], metrics["vllm:dejakv_loads"]) == (2, 4 if second == MISS else 6)
    assert not any(metrics.get(f"vllm:dejakv_{name}") for name in ("saves_dropped", "load_failures"))
    assert [held(store, prompt) for prompt in (SHORT, LONG)] == [[True, True]] * 2


def _complete(server: str, prompt: list[int], wish: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    body = {
        "model": "docs", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "kv_transfer_params": {"dejakv": wish},
    }  # fmt: skip
    answer = httpx.post(f"{server}/v1/completions", json=body, timeout=None)
    answer.raise_for_status()
    return tuple(answer.json()["choices"][0]["token_ids"]), answer.json()["kv_transfer_params"]["dejakv"]


def _stored(server: str, count: int) -> None:
    """Waits until so many saves are confirmed."""
    while _figure(server, "vllm:dejakv_saves_total") < count:
        _complete(server, [9, 9, 9, 9], {})  # a step carries the confirmation


def _figure(server: str, name: str) -> float:
    lines = httpx.get(f"{server}/metrics", timeout=None).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def test_a_rank_killed_in_a_blend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose rank dies while the other waits for it ends, those who wait are told, and the donors' state is what it was."""
    store = tmp_path / "store"
    settings = {
        "store_dir": str(store),
        "modes": ["off", "exact", "blend"],
        "blend_max_share": 1.0,
        "blend_share": 0.4,
        "memory_bytes": 0,
        "lookup_timeout_s": 60,
        "load_timeout_s": 60,
    }
    flags = [flag.replace(EXTENSION, DYING) for flag in server_flags(settings)]
    flags += ["--tensor-parallel-size", "2", "--kv-cache-memory-bytes", str(ONE["kv_cache_memory_bytes"])]

    death = Death.in_folder(tmp_path / "fetching", 1, "fetching", 2)
    environment = {"DEJAKV_ADOPT": '{"mode": "off", "semantic_text": false}', **of_two_cpus(), **death.environment}
    with serving(tmp_path / "fetching", flags, environment, forking=False) as server:
        truth, _ = _complete(server, A, {})
        _complete(server, B, {})
        _stored(server, 2)
        blended, told = _complete(server, MOVED, BLEND)
        assert told["method"] == "blend"
        others = (
            tokens(12, seed) + MOVED[12:] for seed in itertools.count(200)
        )  # MOVED itself would be computed in full
        _ends(death, lambda: _complete(server, next(others), BLEND), *SERVER_ENDED)
    assert [held(store, prompt) for prompt in (A, B)] == [[True, True]] * 2

    with running(extra=settings, worker_extension_cls=EXTENSION, **TWO) as engine:
        exact, mixed = engine.ask([A, MOVED], wish=[LOOK, BLEND], salt=DEFAULT_PARTITION)
    assert (exact.told["level"], exact.tokens) == (HIT, truth)
    assert (mixed.told["method"], mixed.tokens) == ("blend", blended)
    assert not leftovers(store)

"""Engines of the model of integers, and a store that is made to wait."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import toy_engine
from toy_engine import ToyEngine

from dejakv.store.store import Store


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    toy_engine.start_distributed(tmp_path_factory.mktemp("world"))
    yield
    toy_engine.end_distributed()


@pytest.fixture
def toy(world: None) -> Iterator[Callable[..., ToyEngine]]:
    """Starts engines, one at a time: the one before is ended."""
    started: list[ToyEngine] = []

    def end() -> None:
        while started:
            started.pop().close()

    def start(extra: dict[str, Any], **size: Any) -> ToyEngine:
        end()
        started.append(ToyEngine(extra, **size))
        return started[-1]

    yield start
    end()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Has a method of the store wait for an event, which it gives."""
    events: list[threading.Event] = []

    def hold(name: str) -> threading.Event:
        go, real = threading.Event(), getattr(Store, name)
        monkeypatch.setattr(Store, name, lambda *given: (go.wait(60), real(*given))[1])
        events.append(go)
        return go

    yield hold
    for go in events:
        go.set()

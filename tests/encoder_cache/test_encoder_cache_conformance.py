"""What engines count on from a view of an encoder cache, in memory and over a folder."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.encoder_cache import EncoderView, VisualKVCache

Views = Callable[[str, str], EncoderView]


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Views]:
    """Gives views of one cache, by epoch and partition."""
    with VisualKVCache(disk=tmp_path / "outputs" if request.param == "disk" else None) as cache:
        yield cache.view


def test_computes_once_and_returns_what_was_computed(make: Views) -> None:
    view = make("e", "p")
    made = np.ones((3, 4), np.float32)
    assert view.get_or_compute("h", "image", lambda: made) is made
    assert view.get_or_compute("h", "image", pytest.fail) is made
    block = view.lookup("h")
    assert block is not None
    assert block.embedding is made


def test_epochs_partitions_and_modalities_are_apart(make: Views) -> None:
    view = make("e", "p")
    view.store("h", "image", np.ones((3, 4), np.float32))
    assert make("e", "q").lookup("h") is None
    assert make("f", "p").lookup("h") is None
    assert view.lookup("h", "video") is None
    assert make("e", "p").lookup("h") is not None


def test_threads_share_one_run(make: Views) -> None:
    view = make("e", "p")
    runs: list[int] = []

    def compute() -> Any:
        runs.append(1)
        time.sleep(0.02)
        return np.ones((3, 4), np.float32)

    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda _: view.get_or_compute("h", "image", compute), range(8)))
    assert len(runs) == 1
    assert all(item is got[0] for item in got)


def test_a_failed_encoder_is_tried_again(make: Views) -> None:
    view = make("e", "p")

    def broken() -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        view.get_or_compute("h", "image", broken)
    assert view.lookup("h") is None
    assert view.get_or_compute("h", "image", lambda: np.ones((3, 4), np.float32)) is not None

"""A child of `fork` has a store, a worker and locks of its own: nothing that a parent's thread did or held makes it wait."""

import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.store import forks
from dejakv.store.base import RawTensor, StateInfo
from dejakv.store.open import open_store
from dejakv.store.selection import Selection
from dejakv.store.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_child(work: Callable[[], object]) -> bool:
    """Whether a forked child did the work; one that hangs is ended by its own alarm."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def meta(id: str) -> StateInfo:
    return StateInfo(id, "default", "epoch", tuple(range(40)), id, "")


def state() -> RawTensor:
    return RawTensor(np.zeros((2, 1, 1, 40, 4), np.float32), "F32")


def store_into(store: Store) -> None:
    assert store.submit(meta("child"), state)
    store.flush()
    assert store.get("child") is not None


ACTS: dict[str, Callable[[Store], object]] = {
    "flush": Store.flush,
    "purge": lambda store: store.purge(Selection(partition="default")),
    "clear": Store.clear,
    "submit": store_into,
    "close": Store.close,
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_child_forked_while_the_worker_has_an_item_does_not_hang(tmp_path: Path, place: str, act: str) -> None:
    store = open_store(tmp_path / "store" if place == "disk" else None)
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> RawTensor:
        entered.set()
        go_on.wait()
        return state()

    store.submit(meta("slow"), slow)
    assert entered.wait(30)
    store.submit(meta("waits"), state)
    try:
        assert in_child(lambda: ACTS[act](store))
    finally:
        go_on.set()
    store.flush()
    store.close()


def test_a_lock_that_another_thread_holds_is_free_in_a_child() -> None:
    for lock in (forks.fork_safe_lock(), forks.fork_safe_rlock()):
        taken, release = threading.Event(), threading.Event()

        def hold(lock: Any = lock, taken: Any = taken, release: Any = release) -> None:
            with lock:
                taken.set()
                release.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(30)
        try:
            assert in_child(lock.__enter__)
            assert not lock.acquire(blocking=False), "the parent's own thread has it still"
        finally:
            release.set()
            thread.join()

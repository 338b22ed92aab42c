"""A process that is killed while files leave: no row loses its file, and nothing that left comes back."""

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dejakv.errors import StoreError
from dejakv.store import Store, open_store
from dejakv.store.selection import Selection
from dejakv.testing.stored_states import check_whole, make_prompt_state, make_stored_state

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

GONE = [make_prompt_state(range(first, first + 600), ttl=60.0, created=1000.0) for first in (1000, 2000)]
STAYS = make_prompt_state(range(5000, 5100), partition="q", created=1000.0)
REMOVALS: dict[str, Callable[[Store], object]] = {
    "delete": lambda store: store.delete(GONE[0].meta.id),
    "clear": lambda store: store.clear("p"),
    "purge": lambda store: store.purge(Selection("p")),
    "eviction": lambda store: store.put(make_stored_state(partition="q", created=1000.0)),
    "expiry": lambda store: store.sweep(),
}


def opened(folder: Path, now: list[float], **settings: Any) -> Store:
    return open_store(folder, clock=lambda: now[0], background=False, **settings)


def killed_at_the_first_file(folder: Path, removal: str, *, before: bool) -> None:
    """Removes in a process that is killed before or after the first file leaves."""
    child = os.fork()
    if child == 0:
        unlink, now = os.unlink, [1000.0]

        def die(*arguments: Any, **options: Any) -> None:
            if not before:
                unlink(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            store = opened(folder, now, max_entries=3 if removal == "eviction" else 0)
            os.unlink, now[0] = die, 1030.0 if removal != "expiry" else 2000.0
            REMOVALS[removal](store)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "no file was removed"


def rows_and_files(folder: Path) -> tuple[set[str], set[str]]:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    rows = {f"{name}.safetensors" for (name,) in connection.execute("SELECT name FROM segments")}
    connection.close()
    return rows, {path.name for path in folder.glob("segments/*/*")}


@pytest.mark.parametrize("before", [True, False], ids=["before-a-file", "after-a-file"])
@pytest.mark.parametrize("removal", REMOVALS)
def test_rows_leave_before_their_files(tmp_path: Path, removal: str, before: bool) -> None:
    store = opened(tmp_path, [1000.0])
    for stored_state in (*GONE, STAYS):
        assert store.put(stored_state)
    store.close()
    killed_at_the_first_file(tmp_path, removal, before=before)
    rows, files = rows_and_files(tmp_path)
    assert rows < files, "each row has its file"
    again = opened(tmp_path, [1030.0])
    rows, files = rows_and_files(tmp_path)
    assert rows == files, "what was leaving has left"
    assert again.stats().corrupt == 0
    left = GONE[:1] if removal in ("delete", "eviction") else GONE
    for stored_state in left:
        assert again.get(stored_state.meta.id) is None
        assert removal == "eviction" or again.find("p", "e", stored_state.meta.token_ids) is None, "nothing comes back"
    check_whole(again, [stored_state for stored_state in (*GONE, STAYS) if stored_state not in left])
    again.close()


def test_files_that_cannot_leave_now_leave_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their entries are gone; a purge says that it has not removed them, until it has."""
    store = opened(tmp_path, [1000.0])
    for stored_state in (*GONE, STAYS):
        assert store.put(stored_state)

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "not allowed")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fail)
        assert store.delete(GONE[0].meta.id)
        for _ in range(2):
            with pytest.raises(StoreError, match="could not be removed"):
                store.purge(Selection("p"))
        assert store.put(make_stored_state(created=1000.0)), "what leaves does not stand in the way of what comes"
    assert [store.get(stored_state.meta.id) for stored_state in GONE] == [None, None]
    store.purge(Selection("p"))
    rows, files = rows_and_files(tmp_path)
    assert rows == files
    check_whole(store, [STAYS])
    store.close()

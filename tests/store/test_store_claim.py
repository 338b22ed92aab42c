"""Which folders are stores. Nothing else is opened, swept, purged or cleared, and no link is followed."""

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dejakv.errors import StoreError
from dejakv.store import purge_folder
from dejakv.store.open import open_store
from dejakv.testing import make_stored_state

MARKER = "dejakv-store.json"


def contents(folder: Path) -> dict[str, object]:
    """Everything below a folder: what files hold, where links lead, and modes."""

    def one(path: Path) -> object:
        if path.is_symlink():
            return os.readlink(path)
        return path.read_bytes() if path.is_file() else stat.S_IMODE(path.lstat().st_mode)

    return {str(path.relative_to(folder)): one(path) for path in sorted(folder.rglob("*"))}


def written(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "catalog.sqlite":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE books (title)")
            connection.commit()
    elif name == "link":
        written(folder.parent, "home/Documents/a.txt")
        (folder / "segments").symlink_to(folder.parent / "home")
    else:
        path.write_text("my own data")


USERS = [
    *("segments/book/page1.txt", "temporary/thesis.tex", "quarantine/virus.zip", "segments/ab/model.safetensors"),
    *("catalog.sqlite", "catalog.sqlite.bak", "link", "dejakv-store.json.bak"),
]


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("use", [open_store, purge_folder])
def test_a_users_folder_is_refused_and_left_as_it_is(tmp_path: Path, name: str, use: Callable[[Path], object]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    written(folder, name)
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=r"holds other files.*give a new or empty folder"):
        use(folder)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("part", ["segments", "temporary", MARKER, "catalog.sqlite", "catalog.sqlite-wal"])
def test_a_store_whose_part_became_a_link_is_refused(tmp_path: Path, part: str) -> None:
    store = open_store(tmp_path / "store")
    store.put(make_stored_state(1))
    store.close()
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "store" / part
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.touch()
    path.symlink_to(elsewhere)
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="give another folder"):
        open_store(tmp_path / "store")
    assert contents(tmp_path) == before


def test_a_link_that_appears_in_an_open_store_is_not_followed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    stored_state = make_stored_state(1)
    assert store.put(stored_state)
    (group,) = (tmp_path / "store" / "segments").iterdir()
    group.rename(tmp_path / "elsewhere")
    group.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "home").mkdir()
    (tmp_path / "store" / "quarantine").symlink_to(tmp_path / "home")
    before = contents(tmp_path / "elsewhere")
    assert store.get(stored_state.meta.id) is None
    assert (store.stats().corrupt, store.stats().misses, store.stats().entries) == (1, 1, 0)
    assert store.clear() == 0
    assert store.put(stored_state), "in another folder"
    assert contents(tmp_path / "elsewhere") == before
    store.close()
    open_store(tmp_path / "store").close()
    purge_folder(tmp_path / "store")
    assert contents(tmp_path / "elsewhere") == before
    assert (tmp_path / "home").is_dir()


def test_a_folder_given_as_a_link_is_resolved_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    store = open_store(link)
    assert store.put(make_stored_state(1))
    link.unlink()
    link.symlink_to(tmp_path)
    assert store.put(make_stored_state(2))
    assert store.get(make_stored_state(1).meta.id) is not None
    store.close()
    assert (tmp_path / "real" / MARKER).is_file()
    link.unlink()
    link.symlink_to(tmp_path / "real")
    assert purge_folder(link) > 0
    assert not (tmp_path / "real").exists()
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ('{"format": 4, "id": "x", "more": 1}', "made by a newer DejaKV.*update DejaKV, or give another folder"),
        *((text, r'is damaged: write {"format": 3} into it') for text in ('{"format": "1"}', "[" * 5000, "", "\udcff")),
    ],
)
def test_a_marker_of_another_format_is_refused_with_the_remedy(tmp_path: Path, said: str, remedy: str) -> None:
    store = open_store(tmp_path / "store")
    store.put(make_stored_state(1))
    store.close()
    (tmp_path / "store" / MARKER).write_bytes(said.encode("utf-8", "surrogateescape"))
    before = contents(tmp_path)
    for use in (open_store, purge_folder):
        with pytest.raises(StoreError, match=remedy):
            use(tmp_path / "store")
        assert contents(tmp_path) == before


def test_a_store_that_lost_its_marker_is_left_alone_until_it_has_one_again(tmp_path: Path) -> None:
    """What the error of a damaged marker says."""
    store = open_store(tmp_path / "store")
    stored_state = make_stored_state(1)
    store.put(stored_state)
    store.close()
    (tmp_path / "store" / MARKER).unlink()
    before = contents(tmp_path)
    for use in (open_store, purge_folder):
        with pytest.raises(StoreError, match="left alone"):
            use(tmp_path / "store")
    assert contents(tmp_path) == before
    (tmp_path / "store" / MARKER).write_text('{"format": 3}')
    (tmp_path / "store" / MARKER).chmod(0o600)
    again = open_store(tmp_path / "store")
    assert again.get(stored_state.meta.id) is not None
    again.close()


def test_a_process_killed_while_it_made_a_store_leaves_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / f"{MARKER}.new").write_text('{"for')
    open_store(tmp_path / "store").close()
    (tmp_path / "store" / "catalog.sqlite").unlink()
    store = open_store(tmp_path / "store")
    assert store.put(make_stored_state(1))
    assert store.stats().corrupt == 0
    store.close()


@pytest.mark.parametrize("part", [MARKER, "catalog.sqlite", "file"])
def test_what_somebody_else_may_have_written_is_not_read(tmp_path: Path, part: str) -> None:
    """A folder that was once open to all keeps what others put there."""
    store = open_store(tmp_path / "store")
    stored_state = make_stored_state(1)
    store.put(stored_state)
    store.close()
    file = next((tmp_path / "store" / "segments").glob("*/*"))
    os.chmod(file if part == "file" else tmp_path / "store" / part, 0o777)
    os.chmod(tmp_path / "store", 0o777)
    if part in (MARKER, "catalog.sqlite"):
        with pytest.raises(StoreError, match=r"somebody else may have made this cache: give another folder"):
            open_store(tmp_path / "store")
        return
    again = open_store(tmp_path / "store")
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert again.get(stored_state.meta.id) is None
    assert again.stats().corrupt == 1
    again.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_what_belongs_to_somebody_else_is_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.put(make_stored_state(1))
    file = next((tmp_path / "store" / "segments").glob("*/*"))
    os.chown(file, 1234, 1234)
    assert store.get(make_stored_state(1).meta.id) is None
    assert store.stats().corrupt == 1
    store.close()
    os.chown(tmp_path / "store" / "catalog.sqlite", 1234, 1234)
    with pytest.raises(StoreError, match="somebody else"):
        open_store(tmp_path / "store")
    os.chown(tmp_path / "store", 1234, 1234)
    with pytest.raises(StoreError, match="belongs to another user"):
        open_store(tmp_path / "store")

"""Deleting a store deletes what a store of ours wrote, and nothing else."""

from pathlib import Path

import pytest

from dejakv.errors import StoreError
from dejakv.store import purge_folder
from dejakv.store.open import open_store
from dejakv.store.store import Store
from dejakv.testing import make_stored_state


def filled(folder: Path) -> Store:
    store = open_store(folder)
    for number in range(3):
        assert store.put(make_stored_state(number))
    return store


def test_a_store_goes_with_its_folder(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    damaged = next((tmp_path / "store" / "segments").glob("*/*"))
    damaged.write_bytes(b"damaged")
    assert sum(store.get(meta.id) is None for meta in list(store.metas())) == 1
    store.close()
    assert purge_folder(tmp_path / "store") == 4  # two segments, the catalog, the marker
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert purge_folder(tmp_path / "missing") == 0
    assert purge_folder(str(tmp_path / "empty")) == 0
    assert (tmp_path / "empty").is_dir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="cannot be deleted"):
        purge_folder(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    filled(tmp_path / "store").close()
    group = next((tmp_path / "store" / "segments").iterdir())
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.txt").write_text("mine")
    mine = [tmp_path / "store" / "notes.txt", group / "model.safetensors", tmp_path / "store" / "temporary" / "x"]
    for path in mine:
        path.write_text("mine")
    (tmp_path / "store" / "segments" / "zz").symlink_to(tmp_path / "outside")
    free = next(name for name in map("{:02x}".format, range(256)) if not (group.parent / name).exists())
    (group.parent / free).symlink_to(tmp_path / "outside")
    assert purge_folder(tmp_path / "store") == 5
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert (tmp_path / "outside" / "a.txt").read_text() == "mine"
    # No store any more, and no folder for one.
    with pytest.raises(StoreError, match="holds other files"):
        purge_folder(tmp_path / "store")


def test_the_ranks_below_go_too(tmp_path: Path) -> None:
    filled(tmp_path / "store").close()
    filled(tmp_path / "store" / "tp-0-of-2").close()
    filled(tmp_path / "store" / "own").close()
    assert purge_folder(tmp_path / "store") == 10
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["own"]
    assert open_store(tmp_path / "store" / "own").stats().entries == 3


def test_ranks_alone_go_with_their_folder(tmp_path: Path) -> None:
    for rank in range(2):
        filled(tmp_path / "store" / f"tp-{rank}-of-2").close()
    assert purge_folder(tmp_path / "store") == 10
    assert not (tmp_path / "store").exists()


def test_a_store_in_use_stays(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    with pytest.raises(StoreError, match=r"in use: close it in every process"):
        purge_folder(tmp_path / "store")
    assert store.stats().entries == 3
    assert store.get(make_stored_state(1).meta.id) is not None
    store.close()
    assert purge_folder(tmp_path / "store") == 5

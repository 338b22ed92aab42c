"""A store on a file system that other machines may use is refused before anything is made there."""

from pathlib import Path

import pytest

from dejakv.errors import StoreError
from dejakv.store import claim, open_store

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / {shared} rw,relatime shared:2 - {kind} server:/export rw
31 30 0:41 / {shared}/local\\040disk rw - xfs /dev/vdb rw
a line of a kernel to come
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shared"
    (folder / "local disk").mkdir(parents=True)
    monkeypatch.setattr(claim, "MOUNTS", tmp_path / "mountinfo")
    return folder


def mount(shared: Path, kind: str) -> None:
    (shared.parent / "mountinfo").write_text(MOUNTS.format(shared=shared, kind=kind))


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "ceph"])
def test_a_network_file_system_is_refused(shared: Path, kind: str) -> None:
    mount(shared, kind)
    link = shared.parent / "link"
    link.symlink_to(shared)
    for folder in (shared / "new" / "store", link / "store"):
        with pytest.raises(StoreError, match=rf"network file system \({kind}\).*a disk of this machine"):
            open_store(folder)
    assert sorted(path.name for path in shared.iterdir()) == ["local disk"]


@pytest.mark.parametrize(("kind", "below"), [("nfs4", "local disk"), ("fuse.mergerfs", "."), ("overlay", ".")])
def test_a_disk_of_this_machine_is_not(shared: Path, kind: str, below: str) -> None:
    mount(shared, kind)
    open_store(shared / below / "store").close()
    assert (shared / below / "store").is_dir()


def test_a_system_that_does_not_tell_refuses_nothing(shared: Path) -> None:
    open_store(shared / "store").close()
    assert claim.kind_of(shared) == ""

"""A store on a file system that other machines may use is refused before anything is made there."""

import os
from pathlib import Path

import pytest

from dejakv.errors import StoreError
from dejakv.store import claim, open_store

MOUNTS = """\
22 1 254:99 / / rw,relatime - ext4 /dev/vda rw
a line of a kernel to come
30 22 {device} / /shared rw,relatime shared:2 - {kind} server:/export rw
31 30 0:4100 / /shared/local\\040disk rw - xfs /dev/vdb rw
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr(claim, "MOUNTS", tmp_path / "mountinfo")
    return folder


def mount(shared: Path, kind: str) -> None:
    number = shared.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    (shared.parent / "mountinfo").write_text(MOUNTS.format(device=device, kind=kind))


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "ceph"])
def test_a_network_file_system_is_refused(shared: Path, kind: str) -> None:
    mount(shared, kind)
    link = shared.parent / "link"
    link.symlink_to(shared)
    for folder in (shared / "new" / "store", link / "store"):
        with pytest.raises(StoreError, match=rf"network file system \({kind}\).*a disk of this machine"):
            open_store(folder)
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("kind", ["fuse.mergerfs", "overlay", "xfs"])
def test_a_disk_of_this_machine_is_not(shared: Path, kind: str) -> None:
    mount(shared, kind)
    open_store(shared / "store").close()
    assert (shared / "store").is_dir()


def test_a_system_that_does_not_tell_refuses_nothing(shared: Path) -> None:
    open_store(shared / "store").close()
    assert claim.filesystem_type(shared) == ""

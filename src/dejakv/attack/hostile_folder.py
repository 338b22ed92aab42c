"""A hostile folder: what somebody with access to a cache's folder may leave in it."""

import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dejakv.attack.base import Result, judged
from dejakv.attack.child import Read, faults_of, read_in_children
from dejakv.attack.figures import Share
from dejakv.attack.folder_tricks import TRICKS, Place, Trick
from dejakv.attack.reading import digest_of
from dejakv.attack.scene import Scene
from dejakv.store.base import Chunk
from dejakv.store.open import open_store
from dejakv.testing.chunks import make_chunk

CHUNKS = 3
"""Chunks of each of two partitions."""
SPARE = 128 << 20
"""Bytes of memory beyond those of a clean folder and four times the size of the hostile one."""


@dataclass(frozen=True)
class HostileFolder:
    """module  what reads the folder, in a process of its own; `tricks` by name"""

    module: str = "dejakv.attack.read_folder"
    tricks: Mapping[str, Trick] | None = None
    name: str = "hostile folder"
    tries: str = (
        "files planted, cut, exchanged and replaced by links, pipes and pickles; foreign, damaged and malicious catalogs; huge "
        "sizes; wrong owners and modes. They are opened and read by another process"
    )
    broken_if: str = (
        "anything is unpickled, a chunk is returned that is not the one that was stored, a file outside is changed, the process "
        "crashes, hangs, or needs more memory than the folder explains"
    )
    outside: bool = False

    def run(self, scene: Scene) -> Result:
        chunks = [make_chunk(number, partition=partition) for number in range(CHUNKS) for partition in "ab"]
        findings: list[str] = []
        notes: dict[str, str] = {}
        tricks = self.tricks if self.tricks is not None else TRICKS
        with tempfile.TemporaryDirectory() as temporary:
            clean = Path(temporary) / "clean"
            with_chunks(clean, chunks)
            places = [
                _made(Path(temporary) / str(n), clean, trick, scene.rng(name))
                for n, (name, trick) in enumerate(tricks.items())
            ]
            before = [place.outside_content for place in places]
            sizes = [_size(place.folder) for place in places]
            folders = [str(clean), *(str(place.folder) for place in places)]
            ground, *read = read_in_children(self.module, folders, [chunk.meta.id for chunk in chunks])
            if ground.failed or None in ground.noted["answers"].values():
                findings.append(f"a clean folder is not read: {ground.failed or ground.noted}")
            peak = ground.noted.get("peak", 0)
            right = {chunk.meta.id: digest_of(chunk) for chunk in chunks}
            owners = {chunk.meta.id: chunk.meta.partition for chunk in chunks}
            for number, name in enumerate(tricks):
                place, found = places[number], read[number]
                faults = faults_of(found, right, owners, peak + SPARE + 4 * sizes[number])
                if place.canary.exists():
                    faults.append("a pickle was loaded")
                if place.outside_content != before[number]:
                    faults.append("files outside of the folder were changed")
                findings += [f"{name}: {fault}" for fault in faults]
                notes[name] = "; ".join(faults) or _ending(found)
        refused = sum(bool(found.noted.get("refused")) for found in read)
        figures = {"folders that were not opened": Share(refused, len(tricks))}
        return judged(f"{len(tricks)} kinds of hostile folder, {len(chunks)} chunks in each", findings, figures, notes)


def _made(where: Path, clean: Path, trick: Trick, rng: random.Random) -> Place:
    """A copy of the clean folder after a trick."""
    place = Place(where / "store", rng)
    shutil.copytree(clean, place.folder)
    place.outside.mkdir()
    trick(place)
    return place


def with_chunks(folder: Path, chunks: list[Chunk]) -> None:
    store = open_store(folder)
    for chunk in chunks:
        store.put(chunk)
    store.close()


def _ending(found: Read) -> str:
    if found.noted["refused"]:
        return "refused to open"
    read = sum(digest is not None for digest in found.noted["answers"].values())
    return f"{read} of {len(found.noted['answers'])} chunks read, the others missed"


def _size(folder: Path) -> int:
    """Bytes on the disk; a hole in a file is none."""
    statuses = (path.lstat() for path in folder.rglob("*"))
    return sum(512 * status.st_blocks for status in statuses)

"""A hostile Redis server: whatever it answers, a store gives a miss."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dejakv.attack.base import Result, judged
from dejakv.attack.child import Read, faults_of, read_in_children
from dejakv.attack.fake_redis import FakeRedis
from dejakv.attack.reading import digest_of
from dejakv.attack.redis_tricks import Forged, tricks
from dejakv.attack.scene import Scene
from dejakv.errors import MissingExtraError
from dejakv.testing.chunks import make_chunk

NOTHING = "redis://127.0.0.1:1"
"""Where nothing listens."""
SPARE = 256 << 20
"""Bytes of memory beyond those that a refused connection takes: several times the largest chunk."""


@dataclass(frozen=True)
class HostileRedis:
    """module  what reads from the server, in a process of its own; `only` names of tricks, None for all"""

    module: str = "dejakv.attack.read_redis"
    only: tuple[str, ...] | None = None
    name: str = "hostile Redis"
    tries: str = (
        "a server of this process's own answers with wrong types, wrong and huge lengths, nested and endless answers, garbage, "
        "pickles, chunks of others, more answers than questions, or slowly"
    )
    broken_if: str = (
        "anything is unpickled, a chunk is returned that was not stored, the process crashes or hangs, an operation takes more "
        "than 10 seconds or memory is not bounded"
    )
    outside: bool = False

    def run(self, scene: Scene) -> Result:
        if find_spec("redis") is None:
            raise MissingExtraError("redis", "redis", "a store in Redis")
        chunks = [make_chunk(number) for number in range(2)]
        ids = [chunk.meta.id for chunk in chunks]
        right, owners = {chunk.meta.id: digest_of(chunk) for chunk in chunks}, dict.fromkeys(ids, "p")
        findings: list[str] = []
        notes: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
            forged = Forged(make_chunk(7, partition="q"), Path(temporary))
            known = tricks(forged)
            names = self.only if self.only is not None else tuple(known)
            urls = [servers.enter_context(FakeRedis(known[name])).url for name in names]
            ground, *read = read_in_children(self.module, [NOTHING, *urls], ids)
            peak = ground.noted.get("peak", 0)
            for name, found in zip(names, read, strict=True):
                faults = faults_of(found, right, owners, peak + SPARE)
                findings += [f"{name}: {fault}" for fault in faults]
                notes[name] = "; ".join(faults) or _ending(found)
            findings += [f"a pickle was loaded: {path.name}" for path in sorted(Path(temporary).iterdir())]
        figures = {"slowest operation, seconds": round(max(found.noted.get("slowest", 0.0) for found in read), 2)}
        return judged(f"{len(notes)} kinds of hostile answers, every operation of a store", findings, figures, notes)


def _ending(found: Read) -> str:
    return f"misses, slowest operation {found.noted['slowest']:.1f} s"

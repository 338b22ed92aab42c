"""What a store gives of given ids, noted in a process of its own, so that a crash, a hang or a greed for memory is seen."""

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from dejakv.errors import StoreError
from dejakv.store.base import Chunk, Store
from dejakv.testing.chunks import make_chunk

ADDRESS_SPACE = 8 << 30
"""Bytes beyond which the process gets no memory: the machine goes on."""


def digest_of(chunk: Chunk) -> str:
    """Of all that an engine uses of a chunk."""
    meta, tensor = chunk.meta, chunk.tensor
    described = (meta.id, meta.partition, meta.epoch, meta.token_ids, meta.kind, tensor.dtype, tensor.shape)
    return hashlib.sha256(repr(described).encode() + tensor.data.tobytes()).hexdigest()


def read(make: Callable[[], Store], ids: Sequence[str]) -> dict[str, Any]:
    """Opens a store and uses it in every way.

    refused   why it did not open; the rest is missing then
    answers   digest of what `get` gave, None for a miss, by id; `described`: the id and partition that `meta` gave
    corrupt, misses  as the store counted them; `entries` that it listed
    slowest   seconds of the slowest operation; `peak`: bytes of memory at the worst moment
    """
    noted: dict[str, Any] = {"answers": {}, "described": {}, "refused": ""}
    slowest = 0.0

    def timed(action: Callable[[], Any]) -> Any:
        nonlocal slowest
        began = time.monotonic()
        try:
            return action()
        finally:
            slowest = max(slowest, time.monotonic() - began)

    try:
        store = timed(make)
    except StoreError as error:
        return {**noted, "refused": str(error), "slowest": slowest, "peak": _peak()}
    noted["entries"] = len(timed(lambda: list(store.metas())))
    for id in ids:
        meta = timed(lambda id=id: store.meta(id))
        noted["described"][id] = None if meta is None else [meta.id, meta.partition]
        chunk = timed(lambda id=id: store.get(id))
        noted["answers"][id] = None if chunk is None else digest_of(chunk)
    added = make_chunk(10_000)
    timed(lambda: store.put(added))
    found = timed(lambda: store.get(added.meta.id))
    noted["added"] = None if found is None else digest_of(found) == digest_of(added)
    counted = timed(store.stats)
    noted |= {"corrupt": counted.corrupt, "misses": counted.misses}
    timed(lambda: store.delete(added.meta.id))
    timed(lambda: store.clear("nobody"))
    timed(store.close)
    return {**noted, "slowest": slowest, "peak": _peak()}


def main(make: Callable[[str], Store]) -> None:
    """The process: the place of the store and the ids from the command line, the notes as a line of JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    place, ids = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(read(lambda: make(place), ids)))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

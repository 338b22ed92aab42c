"""What a store gives of given ids, noted in a process of its own, so that a crash, a hang or a greed for memory is seen."""

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import NoneType
from typing import Any

from dejakv.attack.memory import peak
from dejakv.errors import StoreError
from dejakv.store.base import Chunk, ChunkMeta, Store
from dejakv.testing.chunks import make_chunk

_KINDS: dict[str, Any] = {
    "str": str, "int": int, "float": (int, float), "str | None": (str, NoneType), "Mapping[str, Any]": Mapping
}  # fmt: skip
ADDRESS_SPACE = 8 << 30
"""Bytes beyond which the process gets no memory: the machine goes on."""


def digest_of(chunk: Chunk) -> str:
    """Of all that an engine uses of a chunk."""
    meta, tensor = chunk.meta, chunk.tensor
    described = (meta.id, meta.partition, meta.epoch, meta.token_ids, meta.kind, tensor.dtype, tensor.shape)
    return hashlib.sha256(repr(described).encode() + tensor.data.tobytes()).hexdigest()


def mistyped(meta: ChunkMeta) -> list[str]:
    """The fields that are of another type than they should be, or text that is no Unicode."""
    kinds = {item.name: _KINDS[str(item.type)] for item in fields(meta) if str(item.type) in _KINDS}
    wrong = [name for name, kind in kinds.items() if not isinstance(getattr(meta, name), kind)]
    texts = [name for name in kinds if isinstance(getattr(meta, name), str)]
    return wrong + [
        name for name in texts if getattr(meta, name).encode("utf-8", "replace").decode() != getattr(meta, name)
    ]


def read(make: Callable[[], Store], ids: Sequence[str]) -> dict[str, Any]:
    """Opens a store and uses it in every way.

    refused   why it did not open; the rest is missing then
    mistyped  fields of descriptions that are of another type than `ChunkMeta` says
    answers   digest of what `get` gave, None for a miss, by id; `described`: the id and partition that `meta` gave
    corrupt, misses  as the store counted them; `entries` that it listed
    slowest   seconds of the slowest operation
    peak      bytes of memory at the worst moment; 0 if the process has needed as much before
    """
    before = peak() or 0
    noted: dict[str, Any] = {"answers": {}, "described": {}, "refused": "", "mistyped": []}
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
        return {**noted, "refused": str(error), "slowest": slowest, "peak": _since(before)}
    listed = timed(lambda: list(store.metas()))
    noted["entries"] = len(listed)
    for id in ids:
        meta = timed(lambda id=id: store.meta(id))
        noted["mistyped"] += [name for found in (*listed, meta) if found is not None for name in mistyped(found)]
        listed = []
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
    return {**noted, "slowest": slowest, "peak": _since(before)}


def main(make: Callable[[str], Store]) -> None:
    """The process: ids and places of stores from the command line, a line of JSON for each place."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    ids = json.loads(sys.argv[1])
    for place in sys.argv[2:]:
        print(json.dumps(read(partial(make, place), ids)), flush=True)


def _since(before: int) -> int:
    now = peak() or 0
    return now if now > before else 0

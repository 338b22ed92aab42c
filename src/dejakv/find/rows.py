"""Rows of blended prompts as chunks: what later blends may take, and nothing else."""

import time
from collections.abc import Iterable

from dejakv.engines.base import ComputedRows, Prepared
from dejakv.identity import rows_key
from dejakv.store.base import ROWS, ChunkMeta

DONORS = "donors"
"""Entry of a chunk's `metadata`: ids of the chunks whose state went into its own."""


def described_rows(prepared: Prepared, key: str, rows: ComputedRows, first: int, stop: int) -> ChunkMeta:
    """The description of the rows first..stop of a blended prompt. `key`: the prompt's exact key.

    Without prompt and chunk, so that no level can compare it; without spans, since runs hold no media.
    """
    request, token_ids = prepared.request, prepared.token_ids[first:stop]
    id = rows_key(request.partition, prepared.epoch, token_ids, first, rows.generation, key, rows.donors)
    return ChunkMeta(
        id=id,
        partition=request.partition,
        epoch=prepared.epoch,
        token_ids=token_ids,
        prompt="",
        chunk="",
        kind=ROWS,
        created=time.time(),
        metadata={"request": request.id, "prompt": key, DONORS: list(rows.donors)},
        position=first,
        generation=rows.generation,
    )


def derived(metas: Iterable[ChunkMeta], donor: str) -> list[str]:
    """Ids of the chunks that a donor's state went into, directly or through others, each before those made from it.

    A purge of a donor for its content removes these too: they were computed while its text was attended to.
    """
    made_from: dict[str, list[str]] = {}
    for meta in metas:
        for source in meta.metadata.get(DONORS, ()):
            made_from.setdefault(source, []).append(meta.id)
    found = dict.fromkeys(made_from.get(donor, ()))
    waiting = list(found)
    while waiting:
        for id in made_from.get(waiting.pop(), ()):
            if id not in found:
                found[id] = None
                waiting.append(id)
    return list(found)

"""Rows of blended prompts as chunks: what later blends may take, and nothing else."""

from dejakv.engines.base import ComputedRows, Prepared
from dejakv.identity import rows_key
from dejakv.store.age import now
from dejakv.store.base import KV, ROWS, ChunkMeta, Store
from dejakv.store.expiry import remaining, shortest
from dejakv.store.lineage import DONORS, PROMPT


def serves_blends(meta: ChunkMeta, most: int) -> bool:
    """Whether a blend may take a chunk's rows: exact state, or rows of a blend of at most the generation `most`."""
    return meta.kind == KV or (meta.kind == ROWS and meta.generation <= most)


def described_rows(
    prepared: Prepared, key: str, rows: ComputedRows, first: int, stop: int, ttl: float = 0.0
) -> ChunkMeta:
    """The description of the rows first..stop of a blended prompt. `key`: the prompt's exact key; `ttl`: see `ChunkMeta`.

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
        created=now(),
        metadata={"request": request.id, PROMPT: key, DONORS: list(rows.donors)},
        position=first,
        generation=rows.generation,
        ttl=ttl,
    )


def rows_lifetime(store: Store, rows: ComputedRows, ttl: float) -> float:
    """Seconds for which these rows may be used: no longer than any donor whose state they attended to."""
    donors = [meta for meta in map(store.meta, rows.donors) if meta is not None]
    return shortest(ttl, *(remaining(meta, now()) for meta in donors))

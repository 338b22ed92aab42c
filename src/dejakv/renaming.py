"""Moving a partition's entries to another name, which is part of what their ids are made of."""

from dataclasses import replace

from dejakv.errors import StoreError
from dejakv.find.space import moved
from dejakv.identity import exact_key
from dejakv.store.base import KV, Chunk, Store
from dejakv.store.purging import purge
from dejakv.store.selection import Purged, Selection


def rename(store: Store, old: str, new: str) -> tuple[int, Purged]:
    """Stores the prompts of one partition under another one, and purges the first. How many were moved, and what was purged.

    Rows that blends computed and encoder outputs are not moved: they are computed again. A process that serves the old name meanwhile
    may store more under it. Raises: StoreError if a prompt could not be stored; then nothing was removed.
    """
    count = 0
    for meta in sorted(store.metas(old), key=lambda meta: meta.created):
        chunk = store.get(meta.id) if meta.kind == KV else None
        if chunk is None:
            continue
        described = chunk.meta
        id = exact_key(new, described.epoch, described.token_ids, [span.digest for span in described.spans])
        renamed = replace(described, id=id, partition=new, space=moved(described, new), parent="", rows_from=0)
        if not store.put(Chunk(renamed, chunk.tensor)):
            raise StoreError(
                f"the prompt {meta.id} could not be stored under the other name (the log says why): see that the disk has "
                "room for the largest prompt twice, and rename again"
            )
        count += 1
    return count, purge(store, Selection(old))

"""Removing selected entries from a store with everything that was made from them, until no byte of them is left."""

from dejakv.errors import StoreError
from dejakv.store.age import now as clock
from dejakv.store.base import NODE, Scrubs, Store
from dejakv.store.selection import Purged, Selection, chosen, counted
from dejakv.store.wrapper import WrapperStore

_TRIES = 5
"""Searches for entries that other processes made meanwhile from those that were removed."""


def purge(store: Store, selection: Selection, *, dry_run: bool = False) -> Purged:
    """Removes the selected entries; what was removed, or with `dry_run` would be.

    Any number of processes may use the store meanwhile, and notice the removal. What they store later is not removed.
    Raises: StoreError if entries could not be removed.
    """
    below = store
    while isinstance(below, WrapperStore):
        below = below.inner
    purged = Purged()
    for _ in range(_TRIES):
        metas = list(below.metas(selection.partition))
        wanted = chosen(metas, selection, clock())
        if dry_run:
            return counted(metas, wanted)
        if not wanted:
            break
        for meta in wanted:
            below.delete(meta.id)
        left = {meta.id: one for meta in wanted if (one := below.meta(meta.id)) is not None}
        stayed = [meta for meta in wanted if meta.id in left and left[meta.id].kind != NODE]
        if stayed:
            raise StoreError(
                f"{len(stayed)} of {len(wanted)} entries could not be removed (the log says why): make the store "
                "writable and purge again"
            )
        gone = [meta for meta in wanted if meta.id not in left or meta.kind != NODE]
        purged += counted(metas, gone)
    if not dry_run and isinstance(below, Scrubs):
        below.scrub(selection.partition)
    return purged

"""Indexes filled with what is stored, while entries come and go."""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from dejakv.store.base import KV, ChunkMeta
from dejakv.store.store import Store

logger = logging.getLogger(__name__)


class Filling:
    """Lists a store for an index, one listing at a time. What leaves after it was listed, perhaps before its turn to be added,
    does not stay in the index."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._left: set[str] | None = None

    def left(self, id: str) -> None:
        """An entry has left the store. To be called before it is removed from the index, by any thread."""
        left = self._left
        if left is not None:
            left.add(id)

    @contextmanager
    def listed(self, remove: Callable[[str], object]) -> Generator[list[ChunkMeta], None, None]:
        """What is stored, the oldest first, to be added within the block. At its end, `remove` is called for what has left."""
        left = self._left = set()
        try:
            yield sorted(self._store.metas(), key=lambda meta: meta.created)
        finally:
            # From here on what leaves is removed after it was added.
            self._left = None
        for id in left.copy():
            if self._store.meta(id) is None:
                remove(id)


def warn_of_vectors(metas: Sequence[ChunkMeta], embedder: str, *, text: bool, latent: bool) -> None:
    """Says how many stored prompts have vectors of another embedder, and what that costs, if there are any.

    text, latent  whether there are levels that compare vectors of texts, and of latent layers
    """
    prompts = [meta for meta in metas if meta.kind == KV and meta.chunk]
    others = sum(meta.embedder != embedder for meta in prompts)
    costs = ["their texts are embedded again, now and at each start"] * text + ["no latent layer finds them"] * latent
    if others and costs:
        logger.warning(
            "%d of %d stored prompts have vectors of other settings (index_encoder, with `model` the model itself, chunk_window, "
            "levels or embedding_hook): %s. The earlier settings use these vectors; dejakv cache purge removes the prompts",
            others, len(prompts), ", and ".join(costs),
        )  # fmt: skip

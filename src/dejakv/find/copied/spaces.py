"""Copied text in every partition and epoch: an index for each, so that nothing of one shows in another."""

import threading

from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError
from dejakv.find.copied.counts import CopiedCounts, CountsOf
from dejakv.find.copied.cover import Cover, cover
from dejakv.find.copied.fingerprints import GUARANTEED, fingerprints
from dejakv.find.copied.index import CopiedIndex, bytes_of
from dejakv.find.copied.kept_tokens import KeptTokens
from dejakv.find.copied.verify import TokensOf
from dejakv.store.base import ChunkMeta, Store
from dejakv.tokens import Ids, with_media

MAX_BYTES = 256 << 20
"""Memory of one space: about 170 million tokens."""

Space = tuple[str, str]


def tokens_from(store: Store) -> TokensOf:
    """Token ids by chunk id, from the store's descriptions."""

    def tokens_of(id: str) -> Ids | None:
        meta = store.meta(id)
        return None if meta is None else with_media(meta.token_ids, meta.spans)

    return tokens_of


class CopiedText:
    """Which runs of a prompt stand in stored chunks of its partition and epoch. Thread-safe; a search waits for no change.

    tokens_of  token ids `[n]` of a chunk as `with_media` gives them, None for one that is gone; `tokens_from(store)` is one
    max_bytes  memory of one space. When it is reached, the chunks that were added first leave that space's index until an eighth
               is free. They stay in the store and are found by other levels. A chunk that needs more than half of it alone is
               not indexed.
    least      tokens in the shortest run; below 32 some are missed
    worth      tokens that what is left of a run, beside longer ones, must have to be used

    Raises: ConfigError for bounds below 1.
    """

    def __init__(
        self, tokens_of: TokensOf, *, max_bytes: int = MAX_BYTES, least: int = GUARANTEED, worth: int = 1
    ) -> None:
        if min(max_bytes, least, worth) < 1:
            raise ConfigError(f"copied text with {max_bytes=}, {least=}, {worth=}: each must be 1 or more")
        self.max_bytes = max_bytes
        self.least = least
        self.worth = worth
        self._tokens_of = tokens_of
        self._counts = CountsOf()
        self._indexes: dict[Space, CopiedIndex] = {}
        self._tokens: dict[Space, KeptTokens] = {}
        self._space_of: dict[str, Space] = {}
        self._generations: dict[str, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._space_of)

    def __contains__(self, id: object) -> bool:
        return id in self._space_of

    @property
    def nbytes(self) -> int:
        """Memory of all spaces; names and bookkeeping of chunks are estimated."""
        with self._lock:
            return sum(part.nbytes for parts in (self._indexes, self._tokens) for part in parts.values())

    def add(self, meta: ChunkMeta) -> bool:
        """Makes a chunk findable. False for one that is known, is shorter than a run or too large for the limit."""
        found = fingerprints(with_media(meta.token_ids, meta.spans))
        if 2 * bytes_of(len(found)) > self.max_bytes:
            self._counts.add(meta.partition, refused=1)
            return False
        space = (meta.partition, meta.epoch)
        while True:
            with self._lock:
                index = self._indexes.setdefault(space, CopiedIndex())
                self._tokens.setdefault(space, KeptTokens(self._tokens_of))
            added = index.add(meta.id, found)
            with self._lock:
                if self._indexes.get(space) is index:  # not dropped for being empty meanwhile
                    if added:
                        self._space_of[meta.id] = space
                        if meta.generation:
                            self._generations[meta.id] = meta.generation
                    break
        if index.nbytes > self.max_bytes:
            gone = index.shrink(self.max_bytes - self.max_bytes // 8)
            self._counts.add(meta.partition, evicted=len(gone))
            with self._lock:
                for id in gone:
                    self._forget(id)
        self._drop_if_empty(space, index)
        return added

    def remove(self, id: str) -> bool:
        """Makes a chunk unfindable; False for one that is not held."""
        with self._lock:
            space = self._forget(id)
            index = None if space is None else self._indexes.get(space)
        if space is None or index is None:
            return False
        index.remove(id)
        self._drop_if_empty(space, index)
        return True

    def search(self, prepared: Prepared, epoch: str) -> Cover:
        """The chunks that cover a prompt, by their ids, and where. Their use is noted."""
        target = with_media(prepared.token_ids, prepared.spans)
        partition = prepared.request.partition
        with self._lock:
            index = self._indexes.get((partition, epoch))
            tokens_of = self._tokens.get((partition, epoch), self._tokens_of)
        found = Cover(len(target))
        if index is not None:
            found = cover(
                target, index, tokens_of, self.least, worth=self.worth,
                generation_of=lambda id: self._generations.get(id, 0),
            )  # fmt: skip
            index.used(found.donors)
        self._counts.add(
            partition, searches=1, hits=int(bool(found.runs)), tokens=found.tokens, covered=found.covered,
            candidates=found.candidates, dropped=found.dropped, gone=found.gone,
        )  # fmt: skip
        return found

    def tokens(self, meta: ChunkMeta) -> Ids:
        """Token ids of a stored chunk as `with_media` gives them: those that a search has just compared are held."""
        with self._lock:
            tokens_of = self._tokens.get((meta.partition, meta.epoch))
        held = tokens_of(meta.id) if tokens_of is not None and meta.id in self else None
        return with_media(meta.token_ids, meta.spans) if held is None else held

    def counts(self, partition: str | None = None) -> CopiedCounts:
        """What one partition's searches found; None sums over all, for the operator of the process."""
        return self._counts.of(partition)

    def forget(self, partition: str) -> None:
        """Forgets one partition's counts."""
        self._counts.clear(partition)

    def _drop_if_empty(self, space: Space, index: CopiedIndex) -> None:
        with self._lock:
            if not len(index) and self._indexes.get(space) is index:
                del self._indexes[space], self._tokens[space]

    def _forget(self, id: str) -> Space | None:
        """The space of a segment that is gone; the caller holds the lock."""
        space = self._space_of.pop(id, None)
        self._generations.pop(id, None)
        if space in self._tokens:
            self._tokens[space].forget(id)
        return space

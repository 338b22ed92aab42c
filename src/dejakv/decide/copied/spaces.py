"""Copied text of every partition and epoch: an index for each, so that nothing of one shows in another."""

import threading

from cachetools import LRUCache

from dejakv.decide.copied.fingerprints import GUARANTEED, fingerprints
from dejakv.decide.copied.index import CopiedIndex, bytes_of
from dejakv.decide.copied.search import Cover, TokensOf, cover
from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError
from dejakv.store.base import ChunkMeta
from dejakv.store.store import Store
from dejakv.tokens import Ids, with_media

MAX_BYTES = 256 << 20
"""Memory of one space: about 170 million tokens."""

KEPT_BYTES = 16 << 20
"""Token ids of the segments that one space compares most often: 500 prompts of 4,000 tokens. With a quarter of it, lookups of 64
prompts of 8,000 tokens at once spent most of their time in making arrays of the same 85 donors."""

Space = tuple[str, str]


class _Space:
    """The index of one space, and the token ids that its searches compared last."""

    def __init__(self, kept: int) -> None:
        self.index = CopiedIndex()
        self.generations: dict[str, int] = {}
        self.tokens: LRUCache[str, Ids] = LRUCache(kept, getsizeof=lambda ids: max(1, ids.nbytes))


def tokens_from(store: Store) -> TokensOf:
    """Reads token ids by chunk id from the store's descriptions."""

    def tokens_of(id: str) -> Ids | None:
        meta = store.meta(id)
        return None if meta is None else with_media(meta.token_ids, meta.spans)

    return tokens_of


class CopiedText:
    """Finds runs of a prompt in stored chunks of its partition and epoch. Thread-safe; a search waits for no change.

    tokens_of   token ids `[n]` of a chunk as `with_media` gives them, None for one that is gone; `tokens_from(store)` is one
    max_bytes   memory of one space's index. When it is reached, the chunks that were added first leave that index until an eighth is
                free. They stay in the store and are found by other levels. A chunk that needs more than half of it alone is not indexed
    least       tokens in the shortest run; below 32 some are missed
    worth       least tokens of what remains of a run beside longer ones
    kept_bytes  token ids kept of the segments that one space compared last

    Raises: ConfigError for bounds below 1.
    """

    def __init__(
        self,
        tokens_of: TokensOf,
        *,
        max_bytes: int = MAX_BYTES,
        least: int = GUARANTEED,
        worth: int = 1,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        if min(max_bytes, least, worth) < 1:
            raise ConfigError(f"copied text with {max_bytes=}, {least=}, {worth=}: each must be 1 or more")
        self.max_bytes = max_bytes
        self.least = least
        self.worth = worth
        self._kept_bytes = kept_bytes
        self._tokens_of = tokens_of
        self._spaces: dict[Space, _Space] = {}
        self._space_of: dict[str, Space] = {}
        self._changing = threading.Lock()
        self._lock = threading.Lock()  # of kept tokens, for microseconds

    def __len__(self) -> int:
        return len(self._space_of)

    def __contains__(self, id: object) -> bool:
        return id in self._space_of

    @property
    def nbytes(self) -> int:
        """Memory of all spaces; names and bookkeeping of chunks are estimated."""
        with self._changing:
            return sum(space.index.nbytes + int(space.tokens.currsize) for space in self._spaces.values())

    def add(self, meta: ChunkMeta) -> bool:
        """Makes a chunk findable. False for one that is known, is shorter than a run or too large for the limit."""
        found = fingerprints(with_media(meta.token_ids, meta.spans))
        if 2 * bytes_of(len(found)) > self.max_bytes:
            return False
        with self._changing:
            name = (meta.partition, meta.epoch)
            space = self._spaces.get(name) or _Space(self._kept_bytes)
            if not space.index.add(meta.id, found):
                return False
            self._spaces[name] = space
            self._space_of[meta.id] = name
            if meta.generation:
                space.generations[meta.id] = meta.generation
            if space.index.nbytes > self.max_bytes:
                for id in space.index.shrink(self.max_bytes - self.max_bytes // 8):
                    self._forget(id)
            return True

    def remove(self, id: str) -> bool:
        """Makes a chunk unfindable; False for one that is not held."""
        with self._changing:
            name = self._space_of.get(id)
            if name is None:
                return False
            index = self._spaces[name].index
            index.remove(id)
            self._forget(id)
            if not len(index):
                del self._spaces[name]
            return True

    def search(self, prepared: Prepared, epoch: str) -> Cover:
        """Returns the chunks that cover a prompt, by their ids, and where. Notes their use."""
        target = with_media(prepared.token_ids, prepared.spans)
        partition = prepared.request.partition
        space = self._spaces.get((partition, epoch))
        found = Cover(len(target))
        if space is not None:
            found = cover(
                target,
                space.index,
                lambda id: self._kept(space, id),
                self.least,
                worth=self.worth,
                generation_of=lambda id: space.generations.get(id, 0),
            )
            space.index.used(found.donors)
        return found

    def tokens(self, meta: ChunkMeta) -> Ids:
        """Returns a stored chunk's token ids as `with_media` gives them; those that a search has just compared are kept."""
        space = self._spaces.get((meta.partition, meta.epoch))
        ids = self._kept(space, meta.id) if space is not None and meta.id in self else None
        return with_media(meta.token_ids, meta.spans) if ids is None else ids

    def _kept(self, space: _Space, id: str) -> Ids | None:
        """A segment's token ids, which never change: a common prefix is compared with the same holders again and again."""
        with self._lock:
            kept = space.tokens.get(id)
        if kept is not None:
            return kept
        ids = self._tokens_of(id)
        if ids is not None and ids.nbytes <= space.tokens.maxsize:
            with self._lock:
                space.tokens[id] = ids
        return ids

    def _forget(self, id: str) -> None:
        """Forgets a segment that is gone; the caller holds the lock of changes."""
        space = self._spaces[self._space_of.pop(id)]
        space.generations.pop(id, None)
        with self._lock:
            space.tokens.pop(id, None)

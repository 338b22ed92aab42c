"""Copied text of every partition and epoch: an index for each, so that nothing of one shows in another."""

from cachetools import LRUCache

from dejakv.decide.copied.fingerprints import Fingerprints, Ids, fingerprints, with_media
from dejakv.decide.copied.index import CopiedIndex
from dejakv.decide.copied.search import Cover, cover
from dejakv.request import Prepared
from dejakv.store.base import ChunkMeta
from dejakv.store.store import Store

KEPT_BYTES = 16 << 20
"""Token ids of the segments that one space compares most often: 500 prompts of 4,000 tokens. With a quarter of it, lookups of 64
prompts of 8,000 tokens at once spent most of their time in making arrays of the same 85 donors."""


def fingerprints_of(meta: ChunkMeta) -> Fingerprints:
    """The fingerprints of a stored chunk."""
    return fingerprints(with_media(meta.token_ids, meta.spans))


class _Space:
    """The index of one space, and the token ids that its searches compared last."""

    def __init__(self) -> None:
        self.index = CopiedIndex()
        self.generations: dict[str, int] = {}
        self.tokens: LRUCache[str, Ids] = LRUCache(KEPT_BYTES, getsizeof=lambda ids: max(1, ids.nbytes))


class CopiedText:
    """Finds runs of a prompt in stored chunks of its partition and epoch. About 1.5 bytes of memory a token, far less than its state takes
    in the store.

    store  where the chunks' token ids are
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._spaces: dict[tuple[str, str], _Space] = {}
        self._space_of: dict[str, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._space_of)

    def add(self, meta: ChunkMeta, found: Fingerprints | None = None) -> bool:
        """Makes a chunk findable. False for one that is known or is shorter than a run.

        found  its `fingerprints_of`, if they are known
        """
        name = (meta.partition, meta.epoch)
        space = self._spaces.get(name) or _Space()
        if not space.index.add(meta.id, fingerprints_of(meta) if found is None else found):
            return False
        self._spaces[name] = space
        self._space_of[meta.id] = name
        if meta.generation:
            space.generations[meta.id] = meta.generation
        return True

    def remove(self, id: str) -> bool:
        """Makes a chunk unfindable; False for one that is not held."""
        name = self._space_of.pop(id, None)
        if name is None:
            return False
        space = self._spaces[name]
        space.index.remove(id)
        space.generations.pop(id, None)
        space.tokens.pop(id, None)
        if not len(space.index):
            del self._spaces[name]
        return True

    def search(self, prepared: Prepared, epoch: str) -> Cover:
        """Returns the chunks that cover a prompt, by their ids, and where. Notes their use."""
        target = with_media(prepared.token_ids, prepared.spans)
        space = self._spaces.get((prepared.request.partition, epoch))
        if space is None:
            return Cover(len(target))
        found = cover(
            target,
            space.index,
            lambda id: self._tokens(space, id),
            generation_of=lambda id: space.generations.get(id, 0),
        )
        space.index.used(found.donors)
        return found

    def tokens(self, meta: ChunkMeta) -> Ids:
        """A stored chunk's token ids, as `with_media` gives them."""
        space = self._spaces.get((meta.partition, meta.epoch))
        ids = self._tokens(space, meta.id) if space is not None and meta.id in self._space_of else None
        return with_media(meta.token_ids, meta.spans) if ids is None else ids

    def _tokens(self, space: _Space, id: str) -> Ids | None:
        """A segment's token ids, remembered: a common prefix is compared with the same holders again and again."""
        kept = space.tokens.get(id)
        if kept is not None:
            return kept
        meta = self._store.meta(id)
        if meta is None:
            return None
        ids = with_media(meta.token_ids, meta.spans)
        if ids.nbytes <= space.tokens.maxsize:
            space.tokens[id] = ids
        return ids

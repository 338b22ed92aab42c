"""In-memory LRU store of prompts for token-level reuse, as SemanticShareKV has it.

store = LRUCacheStore(max_items=64)
key = store.put(make_item(engine, prepared, completion.capture()))
blended = engine.blend(other, [store.get(key).stored_state])
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError, InputError, former_fields
from dejakv.identity import exact_key
from dejakv.store.base import RawTensor, StateInfo, StoredState
from dejakv.vectors.base import normalized


@former_fields(chunk="stored_state")
@dataclass(frozen=True)
class CacheItem:
    """A computed prompt with its state, and the vector that finds it.

    Attributes
    ----------
    stored_state : StoredState
        The prompt with its prefill state, a donor for `engine.blend`.
    embedding : float32 array, shape [hidden]
        Mean of the prompt's input embeddings, L2-normalized.
    """

    stored_state: StoredState
    embedding: NDArray[np.float32] = field(repr=False)

    @property
    def key(self) -> str:
        """Id of the prompt's state, by partition, model and token ids."""
        return self.stored_state.meta.id


def make_item(engine: Any, prepared: Prepared, kv: RawTensor) -> CacheItem:
    """Make an item of a computed prompt.

    Raises
    ------
    InputError
        If state and prompt differ in tokens.
    """
    ids, request = prepared.token_ids, prepared.request
    if kv.shape[3] != len(ids):
        raise InputError(
            f"the state holds {kv.shape[3]} tokens, the prompt {len(ids)}: "
            "capture it from the prompt's own run"
        )
    key = exact_key(request.partition, engine.epoch, ids, ())
    meta = StateInfo(
        key, request.partition, engine.epoch, ids, request.prompt, request.chunk, nbytes=kv.nbytes
    )
    return CacheItem(StoredState(meta, kv), normalized(engine.embed_tokens(ids).mean(0)))


class LRUCacheStore:
    """Store of at most `max_items` prompts, which drops the least recently used first.

    Not thread-safe. A `HierarchicalCache` does the same behind requests, for partitions and on
    disk: `--reuse blend --cache-dir DIR`.

    Parameters
    ----------
    max_items : int
        Maximum number of prompts, at least 1.

    Raises
    ------
    ConfigError
        If `max_items` is below 1.
    """

    def __init__(self, max_items: int = 64) -> None:
        if max_items < 1:
            raise ConfigError(f"max_items={max_items}: give at least 1 item")
        self.max_items = max_items
        self._items: OrderedDict[str, CacheItem] = OrderedDict()

    def put(self, item: CacheItem) -> str:
        """Store an item as the most recently used and return its key.

        Parameters
        ----------
        item : CacheItem
            Prompt with its state.

        Returns
        -------
        str
            Key of the item.
        """
        self._items[item.key] = item
        self._items.move_to_end(item.key)
        if len(self._items) > self.max_items:
            self._items.popitem(last=False)
        return item.key

    def get(self, key: str) -> CacheItem | None:
        """Return an item and mark it as used; None for an unknown key.

        Parameters
        ----------
        key : str
            Key that `put` returned.

        Returns
        -------
        CacheItem or None
            The item, or None for an unknown key.
        """
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def items(self) -> Iterator[CacheItem]:
        """Return the items, least recently used first.

        Returns
        -------
        Iterator[CacheItem]
            Iterator over a copy of the list of items.
        """
        return iter(list(self._items.values()))

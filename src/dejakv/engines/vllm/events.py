"""KV events of the store in vLLM's form, so that a router sees what this replica can load.

vLLM publishes the connector's events beside those of its prefix cache, with the same block hashes
and another medium. A block is announced when its prompt is stored, or when a lookup finds it first:
only a request tells vLLM's hash of a block, so state of an earlier process, or of another replica,
is announced at its first hit. It is taken back when the last prompt with it has left the store.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cachetools import LRUCache

from dejakv.store.prefix_keys import PREFIX

OWNER: Final = "dejakv"
"""Name of the tier in events."""

_REMEMBERED: Final = 4096
"""Entries that left before they were announced, and are remembered."""


@dataclass(frozen=True)
class BlockChain:
    """First blocks of a prompt, as an event describes them.

    Attributes
    ----------
    hashes : tuple[bytes, ...]
        vLLM's hash of each block.
    token_ids : tuple[int, ...]
        Their tokens.
    extra_keys : tuple[Any, ...] or None
        What else each block's hash was made of, as vLLM publishes it.
    fields : dict[str, Any]
        Adapter and session of the request.
    """

    hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    extra_keys: tuple[Any, ...] | None
    fields: dict[str, Any]


class StoreEvents:
    """Announces the blocks that can be loaded, each once until it is taken back.

    Used in the engine loop alone, but for `removed`.

    Parameters
    ----------
    block_tokens : int
        Tokens of a KV block.
    chain_of : Callable[[Any, int], BlockChain]
        Describes the first blocks of a request, given their number.
    stored_event, removed_event : Callable[..., Any]
        Make vLLM's `BlockStored` and `BlockRemoved`.
    """

    def __init__(
        self,
        block_tokens: int,
        chain_of: Callable[[Any, int], BlockChain],
        stored_event: Callable[..., Any],
        removed_event: Callable[[list[bytes]], Any],
    ) -> None:
        self._block_tokens, self._chain_of = block_tokens, chain_of
        self._stored_event, self._removed_event = stored_event, removed_event
        self._hashes: dict[str, tuple[bytes, ...]] = {}
        self._holders: Counter[bytes] = Counter()
        """In how many announced entries a block is."""
        self._removals: deque[str] = deque()
        self._left: LRUCache[str, None] = LRUCache(_REMEMBERED)
        self._events: list[Any] = []

    def removed(self, id: str) -> None:
        """Note that an entry has left the store, from any thread."""
        self._removals.append(id)

    def describe(self, id: str, request: Any, tokens: int) -> BlockChain:
        """Describe the full blocks of a request's first tokens, before an entry is announced."""
        self._take_removals()
        # Stored again, or seen again: what left was an entry before this one.
        self._left.pop(id, None)
        return self._chain_of(request, tokens // self._block_tokens)

    def stored(self, id: str, chain: BlockChain) -> None:
        """Announce an entry's blocks, unless it has left since `describe`."""
        self._take_removals()
        before = self._hashes.get(id, ())
        if id in self._left or len(chain.hashes) <= len(before):
            return

        self._hashes[id] = chain.hashes
        self._holders.update(chain.hashes[len(before) :])
        # What is new lies behind what other entries have: a block's hash is of all before it.
        known = sum(self._holders[each] > 1 for each in chain.hashes[len(before) :]) + len(before)
        if known == len(chain.hashes):
            return
        first = known * self._block_tokens
        self._events.append(
            self._stored_event(
                hashes=list(chain.hashes[known:]),
                parent=chain.hashes[known - 1] if known else None,
                token_ids=list(chain.token_ids[first:]),
                extra_keys=list(chain.extra_keys[known:]) if chain.extra_keys else None,
                **chain.fields,
            )
        )

    def found(self, id: str, request: Any, tokens: int) -> None:
        """Announce what a lookup has seen of an entry, if more of it than before.

        A prefix whose entry has left is not announced: nothing tells when its segments leave.
        """
        if id.startswith(PREFIX):
            return
        if tokens // self._block_tokens > len(self._hashes.get(id, ())):
            self.stored(id, self.describe(id, request, tokens))

    def withdraw(self) -> None:
        """Take back all blocks, since the weights may have changed."""
        for id in list(self._hashes):
            self._drop(id)

    def cleared(self) -> None:
        """Note that vLLM told routers to forget all blocks: each is announced at its next hit."""
        self._hashes.clear()
        self._holders.clear()
        self._events.clear()

    def take(self) -> Sequence[Any]:
        """Return the events since the last call."""
        self._take_removals()
        events, self._events = self._events, []
        return events

    def _take_removals(self) -> None:
        while self._removals:
            id = self._removals.popleft()
            self._left[id] = None
            self._drop(id)

    def _drop(self, id: str) -> None:
        hashes = self._hashes.pop(id, ())
        self._holders.subtract(hashes)
        gone = [each for each in hashes if not self._holders[each]]
        for each in gone:
            del self._holders[each]
        if gone:
            self._events.append(self._removed_event(gone))

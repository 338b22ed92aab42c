"""L0: the longest exact token prefix that any stored chunk holds, found by hashed blocks.

A chain of block hashes names a prefix together with its media, partition and epoch, so a dictionary look-up is a proof;
the tokens after the last full block are compared one by one.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from dejakv.identity import BLOCK_TOKENS, Span, block_hashes, common_prefix
from dejakv.store.base import ChunkMeta, Store

COMPARED = 2
"""Chunks with equally many equal blocks whose further tokens are compared."""


@dataclass(frozen=True)
class PrefixHit:
    """The first `tokens` tokens of the prompt equal those of the chunk `donor`, media included."""

    donor: str
    tokens: int


class PrefixIndex:
    """Block hash -> the chunks that hold this prefix. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._holders: dict[str, dict[str, None]] = {}
        self._blocks: dict[str, list[str]] = {}

    def add(self, meta: ChunkMeta) -> None:
        if meta.id in self._blocks:
            return
        hashes = block_hashes(meta.partition, meta.epoch, meta.token_ids, meta.spans)
        with self._lock:
            if meta.id in self._blocks:
                return
            self._blocks[meta.id] = hashes
            for block in hashes:
                self._holders.setdefault(block, {})[meta.id] = None

    def remove(self, donor: str) -> None:
        with self._lock:
            for block in self._blocks.pop(donor, ()):
                holders = self._holders[block]
                holders.pop(donor, None)
                if not holders:
                    del self._holders[block]

    def longest(
        self, partition: str, epoch: str, token_ids: Sequence[int], spans: Sequence[Span] = (), *, whole: bool = False
    ) -> PrefixHit | None:
        """The longest shared prefix of at least one block, at most `len(token_ids) - 1` tokens long; `whole`: one longer.

        Of the chunks that share the most blocks the latest two are compared token by token: others could add no more than a
        part of one block, and each must be fetched.
        """
        hashes = block_hashes(partition, epoch, token_ids, spans, known=self._holders)
        most = len(token_ids) - (not whole)
        best: PrefixHit | None = None
        for depth in range(len(hashes), 0, -1):
            with self._lock:
                donors = list(islice(reversed(self._holders.get(hashes[depth - 1], {})), COMPARED))
            for donor in donors:
                meta = self._store.meta(donor)
                if meta is None:
                    continue
                start = depth * BLOCK_TOKENS  # equal hashes are equal tokens
                tokens = min(common_prefix(token_ids, meta.token_ids, spans, meta.spans, start=start), most)
                if tokens > (best.tokens if best else 0):
                    best = PrefixHit(donor, tokens)
            if best is not None:  # shallower blocks matter only where all holders of this one are gone
                break
        return best

    def __len__(self) -> int:
        return len(self._blocks)


@dataclass(frozen=True)
class EpochPrefixes:
    """The index as one model's prompts see it (`arrange.Prefixes`)."""

    index: PrefixIndex
    epoch: str

    def held(self, token_ids: Sequence[int], partition: str) -> int:
        """How many leading tokens a stored prompt of the partition shares."""
        hit = self.index.longest(partition, self.epoch, token_ids) if token_ids else None
        return hit.tokens if hit is not None else 0

"""Token ids of the segments that one space compares most often, as arrays: a common beginning is compared with the same holders
again and again."""

import threading

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from dejakv.find.copied.verify import TokensOf

KEPT_BYTES = 16 << 20
"""Of one space: 500 prompts of 4,000 tokens. With a quarter of it, lookups of 64 prompts of 8,000 tokens at once spent most of their
time in making arrays of the same 85 donors."""


class KeptTokens:
    """A `TokensOf` that asks another one for whatever it does not hold. Thread-safe.

    A segment's tokens never change, so that only its removal must be told: see `forget`.
    """

    def __init__(self, tokens_of: TokensOf, nbytes: int = KEPT_BYTES) -> None:
        self._tokens_of = tokens_of
        self._held: LRUCache[str, NDArray[np.int64]] = LRUCache(nbytes, getsizeof=_nbytes)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are held."""
        return int(self._held.currsize)

    def __call__(self, id: str) -> NDArray[np.int64] | None:
        with self._lock:
            held = self._held.get(id)
        if held is not None:
            return held
        tokens = self._tokens_of(id)
        if tokens is not None and tokens.nbytes <= self._held.maxsize:
            with self._lock:
                self._held[id] = tokens
        return tokens

    def forget(self, id: str) -> None:
        """The segment is gone."""
        with self._lock:
            self._held.pop(id, None)


def _nbytes(tokens: NDArray[np.int64]) -> int:
    return max(1, tokens.nbytes)

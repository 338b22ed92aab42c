"""The seam by which another way of reuse (blend) runs through the engine: a cache that carries its own plan."""

from typing import Protocol

from transformers.cache_utils import Cache


class PlannedCache(Protocol):
    """A `Cache` that reports length 0 until its prefill is done, so that the whole prompt is given to the model and the
    plan decides, layer by layer, which rows are computed. It is used for one run only.

    cache            what `generate` is given; with beams the engine leaves its batch alone
    computed_tokens  after the run: prompt rows computed, the mean over layers rounded up
    """

    cache: Cache

    def computed_tokens(self) -> int: ...

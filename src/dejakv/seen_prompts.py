"""Which prompts were sent to an engine that keeps their prefixes itself, as vLLM does: enough to arrange the next one."""

import threading
from collections.abc import Sequence

from cachetools import FIFOCache

from dejakv.errors import ConfigError
from dejakv.identity import BLOCK_TOKENS, block_hashes
from dejakv.request import DEFAULT_PARTITION

MAX_BLOCKS = 200_000
"""3.2 million tokens, about 40 MB."""


class SeenPrompts:
    """The leading blocks of 16 tokens of the prompts added, the latest used `max_blocks` of them. Thread-safe; partitions never see
    each other's.

    Raises: ConfigError for a bound below 1.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        if max_blocks < 1:
            raise ConfigError(f"max_blocks={max_blocks}: give 1 or more")
        self._seen: FIFOCache[bytes, None] = FIFOCache(max_blocks)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, token_ids: Sequence[int], partition: str = DEFAULT_PARTITION) -> None:
        """Remembers a prompt. Call it when the prompt is sent, with the ids that the engine makes of it."""
        blocks = _blocks(token_ids, partition)
        with self._lock:
            for block in reversed(blocks):  # the first is the one used latest: a prefix is forgotten from its end
                self._seen[block] = None

    def held(self, token_ids: Sequence[int], partition: str = DEFAULT_PARTITION) -> int:
        """How many leading tokens an earlier prompt shares, in whole blocks; never the last token, which gives the answer."""
        blocks = _blocks(token_ids[: max(0, len(token_ids) - 1)], partition)
        with self._lock:
            first = next((number for number, block in enumerate(blocks) if block not in self._seen), len(blocks))
        return first * BLOCK_TOKENS


def _blocks(token_ids: Sequence[int], partition: str) -> list[bytes]:
    return [bytes.fromhex(block) for block in block_hashes(partition, "", token_ids)]

"""Approximate names, under which vLLM's prefix cache files blended blocks for other blends.

The name of a block is `H("approximate", setting, h)`. `h` is vLLM's own hash of the block: of all
tokens up to its end, salt and media. The setting is what a request chose of how its state is
approximated. The server's settings are the same for all, and vLLM's cache is empty after a change
of weights before anything is blended again (`generations`). The setting names no donor that the
request did not name, and no place where a prompt ceases to be exact. Requests that do not ask for a
blend look up `h` alone, so that they never find such a block. With a certificate the prompt is in
the setting too: its rules are of blends of whole prompts, and say nothing of another prompt behind
their blocks.

How often approximate state went into a block is noted beside its name: 1 for a blend of exact
state.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

from dejakv.engines.vllm.request import RequestState
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.upstream import RenamedBlocks
from dejakv.identity import digest_of

_MARK = secrets.token_bytes(8)
"""End of every name in this process, and of no other hash; it marks KV events."""
_MIN_NOTES = 4096


def approximate_name(setting: str, block_hash: bytes) -> bytes:
    """Return the name of a block with this hash."""
    digest = hashlib.sha256(b"approximate" + setting.encode() + bytes(block_hash)).digest()
    # With the mark events can be filtered without a table of all names.
    return digest[: -len(_MARK)] + _MARK


def is_approximate(block_hash: bytes | int) -> bool:
    """Tell whether a hash in a KV event is an approximate name.

    vLLM publishes all of a hash, or its last 8 bytes as an integer.
    """
    shown = (
        block_hash.to_bytes(len(_MARK), "big") if isinstance(block_hash, int) else bytes(block_hash)
    )
    return shown.endswith(_MARK)


@dataclass
class ApproximateNames:
    """Approximate names of one server's requests. Used in the engine loop alone.

    Attributes
    ----------
    hash_tokens : int
        Tokens of one entry of `Request.block_hashes`.
    block_tokens : int
        Tokens of a KV block, which is filed under the last hash of its tokens.
    max_depth : int
        How often approximate state may go into a block that is shared; 0 if no block is.
    is_cached : Callable[[bytes], bool]
        Tells whether vLLM's prefix cache has a block of this name.
    """

    settings: ConnectorSettings
    hash_tokens: int
    block_tokens: int
    max_depth: int
    is_cached: Callable[[bytes], bool] = lambda name: False
    _makers: dict[bytes, str] = field(default_factory=dict[bytes, str])
    _depths: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _served: dict[str, None] = field(default_factory=dict[str, None])
    _prune_at: int = _MIN_NOTES

    def find_approximate(self, tracked: RequestState, local: int) -> tuple[int, int]:
        """Find blocks of a request under approximate names, behind its exact blocks.

        Parameters
        ----------
        tracked : RequestState
            The request.
        local : int
            End of its exact blocks, in tokens.

        Returns
        -------
        tokens : int
            Tokens in such blocks.
        depth : int
            Their highest depth of approximation.
        """
        if not self.max_depth:
            return 0, 0

        cached_names = list(
            takewhile(
                self.is_cached, map(self._naming(tracked), self._hashes(tracked.request, local))
            )
        )

        return len(cached_names) * self.block_tokens, self._generation(cached_names)

    def count_cached(self, tracked: RequestState) -> int:
        """Count the first tokens of a prompt that vLLM's prefix cache has under its present names.

        The queue asks in each step for each prompt, so the search starts where it ended before:
        vLLM evicts a prompt's last blocks first.
        """
        names = self._hashes(tracked.request, 0)
        cached_blocks = min(tracked.cached_blocks, len(names))

        while cached_blocks and not self.is_cached(names[cached_blocks - 1]):
            cached_blocks -= 1
        while cached_blocks < len(names) and self.is_cached(names[cached_blocks]):
            cached_blocks += 1

        tracked.cached_blocks = cached_blocks
        return cached_blocks * self.block_tokens

    def awaits(self, tracked: RequestState, prefix_tokens: int) -> bool:
        """Tell whether another request is making the block behind the first `prefix_tokens` tokens.

        A request waits for that block for at most `load_timeout_s`.
        """
        stop = (prefix_tokens // self.block_tokens + 1) * self.block_tokens
        # vLLM computes the block of the last token itself.
        if stop >= tracked.request.num_prompt_tokens:
            return False

        block_hash = tracked.request.block_hashes[stop // self.hash_tokens - 1]
        # A renamed request's hashes are approximate names already.
        name = (
            block_hash if tracked.renamed_blocks is not None else self._naming(tracked)(block_hash)
        )

        # False if nobody makes the block, or this request does so itself.
        if self._makers.get(name, tracked.request.request_id) == tracked.request.request_id:
            return False

        now = time.monotonic()
        # Set once, since a maker that never finishes must not hold up others for ever.
        tracked.wait_deadline = tracked.wait_deadline or now + self.settings.load_timeout_s
        return now < tracked.wait_deadline

    def rename(self, tracked: RequestState, local: int) -> bool:
        """File the request's blocks behind `local` under approximate names; False without any."""
        first = local // self.hash_tokens
        if tracked.renamed_blocks is None and first < len(tracked.request.block_hashes):
            tracked.renamed_blocks = RenamedBlocks(tracked.request, first, self._naming(tracked))
        # The exact prefix in vLLM's cache is shorter than when the request was renamed.
        elif tracked.renamed_blocks is not None and first < tracked.renamed_blocks.first:
            tracked.renamed_blocks.move(tracked.request, first)

        return tracked.renamed_blocks is not None

    def settle(self, tracked: RequestState, local: int, *, blends: bool) -> None:
        """Note that vLLM takes the blocks up to `local`, and blends or computes those behind it."""
        if tracked.renamed_blocks is None or tracked.ordered_tokens:
            return

        first = tracked.renamed_blocks.first
        # Blocks between the exact ones and `local` come from another request's blend.
        tracked.shared_tokens = max(
            0, min(local, tracked.request.num_prompt_tokens) - first * self.hash_tokens
        )

        if tracked.shared_tokens:
            tracked.blend_depth = self._generation(
                tracked.request.block_hashes[first : local // self.hash_tokens]
            )
        # It is computed in full after all: its blocks are exact, and all may find them.
        elif not blends and not tracked.request.num_output_tokens:
            tracked.renamed_blocks.restore(tracked.request)
            tracked.renamed_blocks = None

    def note_blend(self, tracked: RequestState) -> None:
        """Note a blend of the request's blocks.

        Others that want the same blocks wait for them, unless these may not serve others.
        """
        self._note_depths(tracked)
        if tracked.renamed_blocks is None or tracked.blend_depth > self.max_depth:
            return

        for name in self._own(tracked, tracked.renamed_blocks):
            # The first one stays, since others may wait for it already.
            self._makers.setdefault(name, tracked.request.request_id)

    def note_filed(self, request_id: str) -> None:
        """Note that a request's blocks are filed, or will not come.

        vLLM files blocks before it asks for a waiting request.
        """
        self._makers = {name: maker for name, maker in self._makers.items() if maker != request_id}

    def note_end(self, tracked: RequestState, *, answered: bool) -> None:
        """Note the end of a request; its answer's blocks are filed by then.

        Its blend ends when the worker says so (`note_filed`).
        """
        self._note_depths(tracked)
        if answered and tracked.approximate and tracked.lookup_result is not None:
            self._served[tracked.lookup_result.key] = None
            # A dict keeps the order of insertion, so the oldest note goes.
            if len(self._served) > _MIN_NOTES:
                del self._served[next(iter(self._served))]

    def served(self, key: str) -> bool:
        """Tell whether a prompt with this exact key was answered from approximate state."""
        return bool(key) and key in self._served

    def _hashes(self, request: Any, local: int) -> Sequence[bytes]:
        """Return the hashes of its blocks behind `local`.

        The block of its last token, which vLLM computes, is not among them.
        """
        stride = self.block_tokens // self.hash_tokens
        last = (request.num_prompt_tokens - 1) // self.block_tokens * stride
        return request.block_hashes[local // self.hash_tokens : last][stride - 1 :: stride]

    def _naming(self, tracked: RequestState) -> Callable[[bytes], bytes]:
        """Return the function that names this request's blocks."""
        options, lookup_result = tracked.options, tracked.lookup_result
        prompt = (
            lookup_result.key
            if lookup_result is not None and self.settings.certificate is not None
            else ""
        )

        return partial(approximate_name, digest_of(str(options.threshold), prompt, *options.donors))

    def _own(self, tracked: RequestState, names: RenamedBlocks) -> Sequence[bytes]:
        """Return the approximate names of the request's blocks behind those that it shares."""
        return tracked.request.block_hashes[
            names.first + tracked.shared_tokens // self.hash_tokens :
        ]

    def _generation(self, names: Sequence[bytes]) -> int:
        """Return the highest noted depth of these blocks."""
        depths = [self._depths[name] for name in names if name in self._depths]
        # Without a note the worst is assumed.
        return max(depths, default=self.max_depth)

    def _note_depths(self, tracked: RequestState) -> None:
        if tracked.renamed_blocks is None:
            return

        for name in self._own(tracked, tracked.renamed_blocks):
            self._depths[name] = max(tracked.blend_depth, self._depths.get(name, 0))

        # A limit that doubles with what remains keeps the cost of pruning constant for each name.
        if len(self._depths) > self._prune_at:
            live_depths = {
                name: depth
                for name, depth in self._depths.items()
                if self.is_cached(name) or name in self._makers
            }
            self._depths, self._prune_at = live_depths, max(_MIN_NOTES, 2 * len(live_depths))

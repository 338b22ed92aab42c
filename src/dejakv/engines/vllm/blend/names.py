"""Approximate names: what vLLM's prefix cache files blended blocks under, so that requests for a blend share them.

The name of a block is `H("approximate", setting, h)`. `h` is vLLM's own hash of the block: of all tokens up to its end, salt and media.
The setting is what a request chose of how its state is approximated; the server's settings are the same for all, and vLLM's cache is
empty after a change of weights before anything is blended again (`generations`). No donor is in it that the request did not name, and not
where a prompt ceases to be exact. Requests that do not ask for a blend look up `h` alone, so that they never find such a block. With a
certificate the prompt is in the setting too: its rules are of blends of whole prompts, and say nothing of another one behind their blocks.

How often approximate state went into a block is noted beside its name: 1 for a blend of exact state.
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
"""Ends every name in this process, and no other hash: KV events are told by it."""
_LEAST_NOTES = 4096


def approximate_name(setting: str, block_hash: bytes) -> bytes:
    """The name of a block with this hash."""
    digest = hashlib.sha256(b"approximate" + setting.encode() + bytes(block_hash)).digest()
    # With the mark events can be filtered without a table of all names.
    return digest[: -len(_MARK)] + _MARK


def is_approximate(block_hash: bytes | int) -> bool:
    """Whether a hash in a KV event is such a name. vLLM publishes all of a hash, or its last 8 bytes as an integer."""
    shown = block_hash.to_bytes(len(_MARK), "big") if isinstance(block_hash, int) else bytes(block_hash)
    return shown.endswith(_MARK)


@dataclass
class ApproximateNames:
    """The approximate names of one server's requests. Used in the engine loop alone.

    hash_tokens   tokens behind one entry of `Request.block_hashes`
    block_tokens  tokens of a KV block, which is filed under the last hash of its tokens
    most          how often approximate state may go into a block that is shared; 0: none is shared
    is_cached     whether vLLM's prefix cache has a block of this name
    """

    settings: ConnectorSettings
    hash_tokens: int
    block_tokens: int
    most: int
    is_cached: Callable[[bytes], bool] = lambda name: False
    _makers: dict[bytes, str] = field(default_factory=dict[bytes, str])
    _generations: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _served: dict[str, None] = field(default_factory=dict[str, None])
    _prune_at: int = _LEAST_NOTES

    def cached(self, tracked: RequestState, local: int) -> tuple[int, int]:
        """Number of tokens behind `local`, the end of its exact blocks, that a request would find under approximate names, and their
        generation."""
        if not self.most:
            return 0, 0
        cached_names = list(takewhile(self.is_cached, map(self._naming(tracked), self._hashes(tracked.request, local))))
        return len(cached_names) * self.block_tokens, self._generation(cached_names)

    def held(self, tracked: RequestState) -> int:
        """Number of first tokens of a prompt that vLLM's prefix cache has under the request's present names.

        The queue asks in each step for each prompt, so the search starts where it ended before: vLLM evicts a prompt's last blocks first.
        """
        names = self._hashes(tracked.request, 0)
        cached_blocks = min(tracked.held, len(names))
        while cached_blocks and not self.is_cached(names[cached_blocks - 1]):
            cached_blocks -= 1
        while cached_blocks < len(names) and self.is_cached(names[cached_blocks]):
            cached_blocks += 1
        tracked.held = cached_blocks
        return cached_blocks * self.block_tokens

    def awaits(self, tracked: RequestState, prefix_tokens: int) -> bool:
        """Whether another request is making the block behind the first `prefix_tokens` tokens, within `load_timeout_s`."""
        stop = (prefix_tokens // self.block_tokens + 1) * self.block_tokens
        if stop >= tracked.request.num_prompt_tokens:  # vLLM computes that one
            return False
        block_hash = tracked.request.block_hashes[stop // self.hash_tokens - 1]
        # A renamed request's hashes are approximate names already.
        name = block_hash if tracked.names is not None else self._naming(tracked)(block_hash)
        # Nobody makes it, or this request does so itself.
        if self._makers.get(name, tracked.request.request_id) == tracked.request.request_id:
            return False

        now = time.monotonic()
        # Set once: one that never finishes must not hold up others for ever.
        tracked.shares_until = tracked.shares_until or now + self.settings.load_timeout_s
        return now < tracked.shares_until

    def rename(self, tracked: RequestState, local: int) -> bool:
        """File the request's blocks behind `local` under their approximate names; False without any."""
        first = local // self.hash_tokens
        if tracked.names is None and first < len(tracked.request.block_hashes):
            tracked.names = RenamedBlocks(tracked.request, first, self._naming(tracked))
        # The exact prefix in vLLM's cache is shorter than when the request was renamed.
        elif tracked.names is not None and first < tracked.names.first:
            tracked.names.move(tracked.request, first)
        return tracked.names is not None

    def settle(self, tracked: RequestState, local: int, *, blends: bool) -> None:
        """Note that vLLM takes the blocks up to `local`, and blends or computes those behind it."""
        if tracked.names is None or tracked.used:
            return
        first = tracked.names.first
        # Blocks between the exact ones and `local` come from another request's blend.
        tracked.shared = max(0, min(local, tracked.request.num_prompt_tokens) - first * self.hash_tokens)
        if tracked.shared:
            tracked.blended = self._generation(tracked.request.block_hashes[first : local // self.hash_tokens])
        # It is computed in full after all: its blocks are exact, and all may find them.
        elif not blends and not tracked.request.num_output_tokens:
            tracked.names.restore(tracked.request)
            tracked.names = None

    def makes(self, tracked: RequestState) -> None:
        """Note a blend of the request's blocks: others that want the same wait for them, unless these may not serve them."""
        self._note(tracked)
        if tracked.names is None or tracked.blended > self.most:
            return
        for name in self._own(tracked, tracked.names):
            # The first one stays, since others may wait for it already.
            self._makers.setdefault(name, tracked.request.request_id)

    def made(self, request_id: str) -> None:
        """Note that a request's blocks are filed (vLLM files them before it asks for a waiting request), or will not come."""
        self._makers = {name: maker for name, maker in self._makers.items() if maker != request_id}

    def over(self, tracked: RequestState, *, answered: bool) -> None:
        """Note the end of a request; its answer's blocks are filed by then. Its blend ends when the worker says so (`made`)."""
        self._note(tracked)
        if answered and tracked.approximate and tracked.found is not None:
            self._served[tracked.found.key] = None
            # A dict keeps the order of insertion, so the oldest note goes.
            if len(self._served) > _LEAST_NOTES:
                del self._served[next(iter(self._served))]

    def served(self, key: str) -> bool:
        """Whether a prompt with this exact key, if it has one, was answered from approximate state."""
        return bool(key) and key in self._served

    def _hashes(self, request: Any, local: int) -> Sequence[bytes]:
        """Hashes of its blocks behind `local`, without those of its last token, which vLLM computes."""
        stride = self.block_tokens // self.hash_tokens
        last = (request.num_prompt_tokens - 1) // self.block_tokens * stride
        return request.block_hashes[local // self.hash_tokens : last][stride - 1 :: stride]

    def _naming(self, tracked: RequestState) -> Callable[[bytes], bytes]:
        """What names this request's blocks."""
        options, lookup_result = tracked.wish, tracked.found
        prompt = lookup_result.key if lookup_result is not None and self.settings.certificate is not None else ""
        return partial(approximate_name, digest_of(str(options.threshold), prompt, *options.donors))

    def _own(self, tracked: RequestState, names: RenamedBlocks) -> Sequence[bytes]:
        """Approximate names of the request's blocks behind those that it shares."""
        return tracked.request.block_hashes[names.first + tracked.shared // self.hash_tokens :]

    def _generation(self, names: Sequence[bytes]) -> int:
        """The highest noted generation of these blocks."""
        depths = [self._generations[name] for name in names if name in self._generations]
        # Without a note the worst is assumed.
        return max(depths, default=self.most)

    def _note(self, tracked: RequestState) -> None:
        if tracked.names is None:
            return
        for name in self._own(tracked, tracked.names):
            self._generations[name] = max(tracked.blended, self._generations.get(name, 0))
        # A limit that doubles with what remains keeps the cost of pruning constant for each name.
        if len(self._generations) > self._prune_at:
            live_depths = {
                name: depth for name, depth in self._generations.items() if self.is_cached(name) or name in self._makers
            }
            self._generations, self._prune_at = live_depths, max(_LEAST_NOTES, 2 * len(live_depths))

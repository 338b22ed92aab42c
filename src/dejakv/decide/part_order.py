"""Orders a prompt's parts so that the longest prefix was computed before.

    seen = dejakv.SeenPrompts()                       # for any engine with prefix caching; or `cache.prefixes(engine.epoch)`
    best = dejakv.arrange(passages, seen, tokenize=tokenizer.encode, before=head, after=question)
    answer = engine.generate(best.prompt)
    seen.add(tokenizer.encode(best.prompt))

Nothing is approximate: the prompt is another one, of the same parts. docs/results/order.md has the effect on answers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cachetools import FIFOCache

from dejakv.errors import ConfigError
from dejakv.identity import BLOCK_TOKENS, DEFAULT_PARTITION
from dejakv.request import PartFrame, Request, check_parts
from dejakv.store.forks import fork_safe_lock
from dejakv.store.keys import PrefixKeys

BEGINNING = 256
"""First characters of a part, which decide whether it may come next."""

MAX_BLOCKS = 200_000
"""3.2 million tokens, about 40 MB."""

Tokenize = Callable[[str], Sequence[int]]

BORDER = BLOCK_TOKENS + 2
"""Tokens at the end of a known opening that may not be found: a part of a block, and tokens across the border."""


class PrefixMemory(Protocol):
    """Memory of earlier prompts."""

    def held(self, token_ids: Sequence[int], partition: str) -> int:
        """Number of leading tokens shared with an earlier prompt of the partition."""
        ...


@dataclass(frozen=True)
class PartArrangement:
    """A prompt in the chosen order.

    order    given places of the parts: `(2, 0, 1)` begins with the third
    prompt   its text
    held     leading tokens computed before; `given`: the same in the given order
    tokens   tokens of the prompt
    seconds  time of the search
    """

    order: tuple[int, ...]
    prompt: str
    held: int
    given: int
    tokens: int
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        return self.order != tuple(range(len(self.order)))

    def of(self, request: Request) -> Request:
        """The request with its parts in this order."""
        return replace(request, prompt=self.prompt, parts=tuple(request.parts[number] for number in self.order))


def arrange(
    parts: Sequence[str],
    cache: PrefixMemory,
    *,
    tokenize: Tokenize,
    before: str = "",
    after: str = "",
    between: str = "\n\n",
    partition: str = DEFAULT_PARTITION,
) -> PartArrangement:
    """Order `parts` for the longest prefix computed before.

    Greedy: each next part lengthens the prefix most, ties to the first. The given order stays unless the prefix grows.

    cache          a `SeenPrompts`, or `HierarchicalCache.prefixes(epoch)`
    tokenize       text to token ids, as the engine tokenizes prompts
    before, after  the prompt around the parts, with `between` between them

    Tokenizes the beginnings of n parts if nothing was seen before; at most n (n + 1) openings. Parts of fewer than 16 tokens are ignored.
    Raises: InputError for no parts, an empty one, or one given twice.
    """
    return arranged(PartFrame(before, between, after, check_parts(parts)), cache, tokenize, partition)


def arranged(frame: PartFrame, cache: PrefixMemory, tokenize: Tokenize, partition: str) -> PartArrangement:
    """`arrange` for the parts of a prompt."""
    began = time.perf_counter()
    initial_order = tuple(range(len(frame.parts)))

    def found(text: str) -> tuple[int, int]:
        ids = tokenize(text)
        return cache.held(ids, partition), len(ids)

    prompt = frame.prompt(initial_order)
    cached_tokens, tokens = found(prompt)
    best = PartArrangement(initial_order, prompt, cached_tokens, cached_tokens, tokens)
    # Parts never seen follow in the order given.
    order = tuple(dict.fromkeys((*_greedy(frame, found), *initial_order)))
    if order != initial_order:
        prompt = frame.prompt(order)
        longer, tokens = found(prompt)
        # A block at least: less is noise of the border, and another order costs answers.
        if longer >= cached_tokens + BLOCK_TOKENS:
            best = PartArrangement(order, prompt, longer, cached_tokens, tokens)
    return replace(best, seconds=time.perf_counter() - began)


def _greedy(frame: PartFrame, measure: Callable[[str], tuple[int, int]]) -> list[int]:
    """Parts computed before, in order; the last perhaps in part."""
    chosen: list[int] = []
    remaining = list(range(len(frame.parts)))
    reached = measure(frame.before)[0] if frame.before else 0
    while remaining:
        # First by beginnings alone: whole parts are tokenized only where these fit.
        promising = [
            number for number in remaining if _begins(frame, chosen, number, measure) >= reached + BLOCK_TOKENS
        ]
        # What stands behind every part is tokenized with it, so that tokens across the border count.
        tried = {number: measure(frame.opening([*chosen, number]) + frame.between) for number in promising}
        if not tried:
            break

        best = max(promising, key=lambda number: tried[number][0])
        longest, length = tried[best]
        chosen.append(best)
        remaining.remove(best)
        reached = longest
        # Its end was not computed before, so no prefix reaches beyond it.
        if longest < length - BORDER:
            break
    return chosen


def _begins(frame: PartFrame, chosen: Sequence[int], number: int, measure: Callable[[str], tuple[int, int]]) -> int:
    """Tokens found with the beginning of a part behind the chosen ones, enough to tell most parts apart."""
    opening = frame.opening([*chosen, number])
    return measure(opening[: len(opening) - max(0, len(frame.parts[number]) - BEGINNING)])[0]


class SeenPrompts:
    """Memory of prompts by leading blocks of 16 tokens, the `max_blocks` last used. Thread-safe; partitions never see each other.

    Raises: ConfigError for a bound below 1.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        if max_blocks < 1:
            raise ConfigError(f"max_blocks={max_blocks}: give 1 or more")
        self._seen: FIFOCache[bytes, None] = FIFOCache(max_blocks)
        self._lock = fork_safe_lock()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, token_ids: Sequence[int], partition: str = DEFAULT_PARTITION) -> None:
        """Remember a sent prompt. `token_ids`: as the engine tokenizes it."""
        blocks = _blocks(token_ids, partition)
        with self._lock:
            for block in reversed(blocks):  # the first is the one used latest: a prefix is forgotten from its end
                self._seen[block] = None

    def held(self, token_ids: Sequence[int], partition: str = DEFAULT_PARTITION) -> int:
        """Number of leading tokens shared with an earlier prompt, in whole blocks; never the last token, which gives the answer."""
        blocks = _blocks(token_ids[: max(0, len(token_ids) - 1)], partition)
        with self._lock:
            first = next((number for number, block in enumerate(blocks) if block not in self._seen), len(blocks))
        return first * BLOCK_TOKENS


def _blocks(token_ids: Sequence[int], partition: str) -> list[bytes]:
    return PrefixKeys(partition, "", token_ids).full[1:]

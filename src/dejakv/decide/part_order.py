"""Parts of a prompt in the order in which most of it was computed before.

    seen = dejakv.SeenPrompts()                       # for any engine with prefix caching; or `cache.prefixes(engine.epoch)`
    best = dejakv.arrange(passages, seen, tokenize=tokenizer.encode, before=head, after=question)
    answer = engine.generate(best.prompt)
    seen.add(tokenizer.encode(best.prompt))

Nothing is approximate: the prompt is another one, with the same parts. docs/plans.md measures what that does to answers.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cachetools import FIFOCache

from dejakv.errors import ConfigError
from dejakv.identity import BLOCK_TOKENS, DEFAULT_PARTITION
from dejakv.request import Frame, check_parts
from dejakv.store.keys import Keys

BEGINNING = 256
"""Characters of a part by which it is seen whether it may come next."""

MAX_BLOCKS = 200_000
"""3.2 million tokens, about 40 MB."""

Tokenize = Callable[[str], Sequence[int]]

BORDER = BLOCK_TOKENS + 2
"""Tokens at the end of a known opening that may not be found: a part of a block, and tokens across the border."""


class Prefixes(Protocol):
    """What remembers prompts."""

    def held(self, token_ids: Sequence[int], partition: str) -> int:
        """How many tokens from the beginning an earlier prompt of the partition shares."""
        ...


@dataclass(frozen=True)
class Arrangement:
    """A prompt in the order chosen.

    order   places of the parts as they were given: `(2, 0, 1)` begins with the third
    prompt  its text
    held    tokens from the beginning that were computed before; `given` so many in the order given
    tokens  tokens of the prompt
    seconds  what the search took
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


def arrange(
    parts: Sequence[str],
    cache: Prefixes,
    *,
    tokenize: Tokenize,
    before: str = "",
    after: str = "",
    between: str = "\n\n",
    partition: str = DEFAULT_PARTITION,
) -> Arrangement:
    """The order of `parts` with the longest prefix that was computed before, by a greedy search: each next part lengthens it most, the
    first of equal ones. The order given stays unless the prefix is longer.

    cache          a `SeenPrompts`, or `HierarchicalCache.prefixes(epoch)`
    tokenize       token ids of a text, as the engine makes them of a prompt
    before, after  the prompt around the parts; `between` stands between them

    Where nothing was seen before, the beginnings of n parts are tokenized; at most n (n + 1) openings. Parts of less than 16 tokens
    are not looked for.

    Raises: InputError for no parts, an empty one, or one given twice.
    """
    return arranged(Frame(before, between, after, check_parts(parts)), cache, tokenize, partition)


def arranged(frame: Frame, cache: Prefixes, tokenize: Tokenize, partition: str) -> Arrangement:
    """`arrange`, of parts that were found in a prompt."""
    began = time.perf_counter()
    given = tuple(range(len(frame.parts)))

    def found(text: str) -> tuple[int, int]:
        ids = tokenize(text)
        return cache.held(ids, partition), len(ids)

    prompt = frame.prompt(given)
    held, tokens = found(prompt)
    best = Arrangement(given, prompt, held, held, tokens)
    order = tuple(dict.fromkeys((*_greedy(frame, found), *given)))
    if order != given:
        prompt = frame.prompt(order)
        longer, tokens = found(prompt)
        if longer >= held + BLOCK_TOKENS:
            best = Arrangement(order, prompt, longer, held, tokens)
    return replace(best, seconds=time.perf_counter() - began)


def _greedy(frame: Frame, found: Callable[[str], tuple[int, int]]) -> list[int]:
    """The parts that were computed before, one behind the other; the last of them perhaps in part."""
    chosen: list[int] = []
    left = list(range(len(frame.parts)))
    reached = found(frame.before)[0] if frame.before else 0
    while left:
        known = [number for number in left if _begins(frame, chosen, number, found) >= reached + BLOCK_TOKENS]
        # What stands behind every part is tokenized with it, so that tokens across the border count.
        tried = {number: found(frame.opening([*chosen, number]) + frame.between) for number in known}
        if not tried:
            break
        best = max(known, key=lambda number: tried[number][0])
        longest, length = tried[best]
        chosen.append(best)
        left.remove(best)
        reached = longest
        if longest < length - BORDER:
            break
    return chosen


def _begins(frame: Frame, chosen: Sequence[int], number: int, found: Callable[[str], tuple[int, int]]) -> int:
    """Tokens found with the beginning of a part behind the chosen ones: most parts are told apart by it."""
    opening = frame.opening([*chosen, number])
    return found(opening[: len(opening) - max(0, len(frame.parts[number]) - BEGINNING)])[0]


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
    return Keys(partition, "", token_ids).full[1:]

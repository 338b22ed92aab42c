"""Order of a prompt's parts for which the longest prefix was computed before.

    seen = dejakv.SeenPrompts()  # for any engine with prefix caching, or cache.prefixes(epoch)
    best = dejakv.arrange(passages, seen, tokenize=tokenizer.encode, before=head, after=question)
    answer = engine.generate(best.prompt)
    seen.add(tokenizer.encode(best.prompt))

Nothing is approximate: the prompt is another one, of the same parts. docs/results/order.md has the
effect on answers.
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
from dejakv.store.prefix_keys import PrefixKeys

BEGINNING = 256
"""First characters of a part, which decide whether it may come next."""

MAX_BLOCKS = 200_000
"""Blocks that `SeenPrompts` remembers by default: 3.2 million tokens, about 40 MB."""

Tokenize = Callable[[str], Sequence[int]]

BORDER = BLOCK_TOKENS + 2
"""Tokens at the end of a computed opening that may be missing from the prefix.

They are a part of a block, and tokens across the border to the next part.
"""


class PrefixMemory(Protocol):
    """Memory of earlier prompts."""

    def prefix_length(self, token_ids: Sequence[int], partition: str) -> int:
        """Return the number of leading tokens shared with an earlier prompt of the partition."""
        ...


@dataclass(frozen=True)
class PartArrangement:
    """A prompt with its parts in the chosen order.

    Attributes
    ----------
    order : tuple[int, ...]
        Places of the parts as they were passed: `(2, 0, 1)` begins with the third.
    prompt : str
        Text of the prompt.
    held : int
        Leading tokens computed before, in this order.
    given : int
        The same in the order that was passed.
    tokens : int
        Tokens of the prompt.
    seconds : float
        Time of the search.
    """

    order: tuple[int, ...]
    prompt: str
    held: int
    given: int
    tokens: int
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether the order differs from the one that was passed."""
        return self.order != tuple(range(len(self.order)))

    def reorder(self, request: Request) -> Request:
        """Return the request with its parts in this order."""
        return replace(
            request, prompt=self.prompt, parts=tuple(request.parts[number] for number in self.order)
        )


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
    """Order `parts` for the longest prefix that was computed before.

    The search is greedy: each next part lengthens the prefix most, of equal ones the first. The
    order stays as passed unless the prefix grows by at least a block. The beginnings of n parts are
    tokenized if nothing was seen before, and at most n (n + 1) openings otherwise. Parts that
    lengthen no prefix, such as those of fewer than 16 tokens, follow in the order passed.

    Parameters
    ----------
    parts : Sequence[str]
        Texts of the parts.
    cache : PrefixMemory
        A `SeenPrompts`, or `HierarchicalCache.prefixes(epoch)`.
    tokenize : Tokenize
        Function from text to token ids, as the engine tokenizes prompts.
    before, after : str
        Prompt around the parts.
    between : str
        Text between two parts, which `before` and `after` do not get.
    partition : str
        Partition whose prompts count.

    Returns
    -------
    PartArrangement
        The order with the longest prefix.

    Raises
    ------
    InputError
        For no parts, an empty part, or one that is passed twice.
    """
    return arrange_frame(
        PartFrame(before, between, after, check_parts(parts)), cache, tokenize, partition
    )


def arrange_frame(
    frame: PartFrame, cache: PrefixMemory, tokenize: Tokenize, partition: str
) -> PartArrangement:
    """Order the parts of a prompt as `arrange` does."""
    began = time.perf_counter()
    initial_order = tuple(range(len(frame.parts)))

    def measure(text: str) -> tuple[int, int]:
        ids = tokenize(text)
        return cache.prefix_length(ids, partition), len(ids)

    prompt = frame.prompt(initial_order)
    cached_tokens, tokens = measure(prompt)

    best = PartArrangement(initial_order, prompt, cached_tokens, cached_tokens, tokens)

    # Parts never seen follow in the order given.
    order = tuple(dict.fromkeys((*_greedy(frame, measure), *initial_order)))
    if order != initial_order:
        prompt = frame.prompt(order)
        longer, tokens = measure(prompt)
        # A block at least: less is noise of the border, and another order costs answers.
        if longer >= cached_tokens + BLOCK_TOKENS:
            best = PartArrangement(order, prompt, longer, cached_tokens, tokens)
    return replace(best, seconds=time.perf_counter() - began)


def _greedy(frame: PartFrame, measure: Callable[[str], tuple[int, int]]) -> list[int]:
    """Return the parts computed before, in order; the last perhaps in part."""
    chosen: list[int] = []
    remaining = list(range(len(frame.parts)))
    reached = measure(frame.before)[0] if frame.before else 0
    while remaining:
        # First by beginnings alone: whole parts are tokenized only where these fit.
        promising = [
            number
            for number in remaining
            if _beginning_tokens(frame, chosen, number, measure) >= reached + BLOCK_TOKENS
        ]
        # What stands behind every part is tokenized with it, so that tokens across the border
        # count.
        tried = {
            number: measure(frame.opening([*chosen, number]) + frame.between)
            for number in promising
        }
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


def _beginning_tokens(
    frame: PartFrame, chosen: Sequence[int], number: int, measure: Callable[[str], tuple[int, int]]
) -> int:
    """Count the prefix tokens with a part's beginning, which tell most parts apart."""
    opening = frame.opening([*chosen, number])
    return measure(opening[: len(opening) - max(0, len(frame.parts[number]) - BEGINNING)])[0]


class SeenPrompts:
    """Memory of prompts by the `max_blocks` leading blocks of 16 tokens that were added last.

    Thread-safe. Partitions never see each other.

    Parameters
    ----------
    max_blocks : int
        Maximum number of remembered blocks, at least 1, each of about 200 bytes.

    Raises
    ------
    ConfigError
        If `max_blocks` is below 1.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        if max_blocks < 1:
            raise ConfigError(f"max_blocks={max_blocks}: give 1 or more")
        self._seen: FIFOCache[bytes, None] = FIFOCache(max_blocks)
        self._lock = fork_safe_lock()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, token_ids: Sequence[int], partition: str = DEFAULT_PARTITION) -> None:
        """Remember a prompt that was sent, with token ids as the engine computes them.

        Parameters
        ----------
        token_ids : Sequence[int]
            Token ids of the prompt, as the engine computes them.
        partition : str
            Partition of the prompt.
        """
        blocks = _blocks(token_ids, partition)
        with self._lock:
            # The first counts as used latest, so that a prefix is forgotten from its end.
            for block in reversed(blocks):
                self._seen[block] = None

    def prefix_length(self, token_ids: Sequence[int], partition: str = DEFAULT_PARTITION) -> int:
        """Return the number of leading tokens shared with an earlier prompt, in whole blocks.

        The last token never counts, since it is computed to give the answer.

        Parameters
        ----------
        token_ids : Sequence[int]
            Token ids of the prompt, as the engine computes them.
        partition : str
            Partition whose prompts count.

        Returns
        -------
        int
            Number of leading tokens, a multiple of 16.
        """
        blocks = _blocks(token_ids[: max(0, len(token_ids) - 1)], partition)
        with self._lock:
            first = next(
                (number for number, block in enumerate(blocks) if block not in self._seen),
                len(blocks),
            )
        return first * BLOCK_TOKENS


def _blocks(token_ids: Sequence[int], partition: str) -> list[bytes]:
    return PrefixKeys(partition, "", token_ids).block_keys[1:]

"""Rules of where snapshots of fixed state stand, compared on a stream of requests by counting.

Keys and values of every earlier token are taken to be there, so that a prompt begins at the last
snapshot within what it shares with an earlier one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK = 16
PARTING_TOKENS = 64
"""Fewest tokens that a snapshot saves where a prompt parts from another, as in the engine."""


@dataclass(frozen=True)
class Turn:
    """One request with its answer: `tokens` in all, of which `prompt` are the prompt's."""

    ids: tuple[int, ...]
    prompt: int


Places = Callable[[Turn, int, int], set[int]]
"""Where a rule places snapshots, from a turn, its first computed token, and its shared tokens."""


def where_prompts_part(turn: Turn, start: int, shared: int) -> set[int]:
    """Place as the engine does: ends of prompt and answer, and where a prompt was seen to part."""
    places = {turn.prompt - 1, len(turn.ids) - 1}
    parting = shared - shared % BLOCK
    return places | {parting} if parting - start >= PARTING_TOKENS else places


def at_ends(turn: Turn, start: int, shared: int) -> set[int]:
    """Place at the ends of prompt and answer alone."""
    return {turn.prompt - 1, len(turn.ids) - 1}


def on_grid(step: int) -> Places:
    """Return the rule of a fixed grid, answers included; vLLM's `all` is that of its block."""

    def places(turn: Turn, start: int, shared: int) -> set[int]:
        return set(range(step, len(turn.ids), step))

    return places


def aligned(block: int, at_once: int) -> Places:
    """Return vLLM's `align`: the last token of each step, where a block ends with it.

    Of a step with the prompt's end the part up to the last whole block is a step of its own. A
    decoded token is a step.
    """

    def places(turn: Turn, start: int, shared: int) -> set[int]:
        last = (turn.prompt - 1) // block * block
        ends = {last, *range(start + at_once - (start + at_once) % block, last, at_once)}
        return ends | {end for end in range(turn.prompt, len(turn.ids)) if end % block == 0}

    return places


@dataclass
class Placement:
    """A rule, the snapshots that it left, and what it let be computed.

    Attributes
    ----------
    places : Places
        The rule.
    budget : int
        Most snapshots; 0: no limit.
    by_saving : bool
        Whether those leave first that save least, by age (as in the store), or the least recently
        used.
    """

    places: Places
    budget: int = 0
    by_saving: bool = True
    computed: list[int] = field(default_factory=list[int])
    placed: int = 0
    _kept: dict[tuple[int, int], list[int]] = field(
        default_factory=dict[tuple[int, int], list[int]]
    )
    _clock: int = 0

    def serve(self, turn: Turn, shared: int) -> None:
        """Count a turn of which `shared` tokens, less than the prompt, were seen before."""
        self._clock += 1
        hashes = prefix_hashes(turn.ids)
        start = max(
            (place for place, key in self._kept if place <= shared and key == hashes[place]),
            default=0,
        )
        if start:
            kept = self._kept[start, hashes[start]]
            kept[0], kept[1] = kept[0] + 1, self._clock
        self.computed.append(turn.prompt - start)
        before = start
        for place in sorted(self.places(turn, start, shared)):
            if place <= start or (place, hashes[place]) in self._kept:
                continue
            self._kept[place, hashes[place]] = [1, self._clock, place - before]
            self.placed += 1
            before = place
            while self.budget and len(self._kept) > self.budget:
                del self._kept[min(self._kept, key=self._worth)]

    def _worth(self, key: tuple[int, int]) -> float:
        uses, used, saved = self._kept[key]
        return uses * saved / (self._clock - used + 1) ** 2 if self.by_saving else used

    @property
    def kept(self) -> int:
        """Snapshots that are left."""
        return len(self._kept)


def prefix_hashes(ids: Sequence[int]) -> list[int]:
    """Return a hash of each prefix, from that of no tokens on."""
    hashes = [0]
    for token in ids:
        hashes.append(hash((hashes[-1], token)))
    return hashes


def shared_tokens(turns: Sequence[Turn]) -> list[int]:
    """Return how many tokens of each prompt, but for its last, some earlier turn began with."""
    seen: set[int] = set()
    shared: list[int] = []
    for turn in turns:
        hashes = prefix_hashes(turn.ids)
        count = 0
        while count < turn.prompt - 1 and hashes[count + 1] in seen:
            count += 1
        shared.append(count)
        # The last token of an answer was never computed.
        seen.update(hashes[: len(turn.ids)])
    return shared


def compare(turns: Sequence[Turn], rules: dict[str, Placement]) -> dict[str, dict[str, Any]]:
    """Return computed tokens and snapshots of each rule, by name."""
    for turn, shared in zip(turns, shared_tokens(turns), strict=True):
        for rule in rules.values():
            rule.serve(turn, shared)
    return {
        name: {"computed": sum(rule.computed), "placed": rule.placed, "kept": rule.kept}
        for name, rule in rules.items()
    }

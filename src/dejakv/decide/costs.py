"""What a plan takes, in seconds: rows computed, bytes loaded, and what a blend takes beyond its rows.

On a CPU a row attends to what is before it alone: to half of the prompt in the mean, and to more behind a prefix. Rows behind a prefix
and rows of a blend do so with an explicit mask, which takes longer than the causal one of a whole prompt. So a very short prefix of a
long prompt would make the request slower.
"""

from dataclasses import dataclass, replace
from statistics import median


@dataclass(frozen=True)
class Costs:
    """The constants of one model on one machine, in seconds.

    row          of one token in all layers, attention to other tokens apart
    pair         of one token that attends to one other in all layers
    byte         of one byte of state that is loaded
    blend        of one token of a prompt that is blended: its map, its keys moved; rows that are computed apart
    whole        share of the prompt that a row of it attends to in the mean: half, or all where hidden keys are computed too
    masked       what a pair costs with an explicit mask, by one without
    token_bytes  bytes of one token's state
    """

    row: float
    pair: float = 0.0
    byte: float = 0.0
    blend: float = 0.0
    whole: float = 0.5
    masked: float = 1.0
    token_bytes: float = 0.0

    def full(self, tokens: int) -> float:
        """A prompt without any state."""
        return tokens * (self.row + self.whole * tokens * self.pair)

    def rows(self, rows: float, tokens: int, held: int = 0) -> float:
        """Some rows of a prompt of `tokens` tokens, all behind its first `held`, the others' state being there."""
        keys = self.whole * tokens + (1 - self.whole) * held
        return rows * (self.row + keys * self.masked * self.pair)

    def load(self, tokens: int) -> float:
        """State of so many tokens."""
        return tokens * self.token_bytes * self.byte

    def prefix(self, held: int, tokens: int) -> float:
        """A prompt from the state of its first `held` tokens."""
        return self.rows(tokens - held, tokens, held) + self.load(held)

    def prefix_saves(self, held: int, other: int, tokens: int) -> bool:
        """Whether an exact prefix of `held` tokens makes a prompt faster than one of `other` tokens."""
        return self.prefix(held, tokens) < min(self.prefix(other, tokens), self.full(tokens))

    def blending(self, rows: float, tokens: int, loaded: int) -> float:
        """A blend that computes so many rows, the mean over layers, from donors of `loaded` tokens."""
        return self.rows(rows, tokens) + tokens * self.blend + self.load(loaded)

    def most_rows(self, seconds: float, tokens: int, loaded: int) -> float:
        """How many rows a blend may compute to take no more than `seconds`; below 0 if it takes more without any."""
        left = seconds - self.blending(0, tokens, loaded)
        return left / self.rows(1, tokens) if self.row or self.pair else float(tokens)

    def fixed(self, constants: tuple[float, ...]) -> "Costs":
        """With `row, pair, byte, blend` given by a setting."""
        row, pair, byte, blend = constants
        return replace(self, row=row, pair=pair, byte=byte, blend=blend)


SEEN = 31
"""Observations that a rate remembers."""

BEGINNINGS = 3
"""Observations that what a rate begins with stands for: one slow request at the start changes nothing."""


class Rate:
    """A constant that follows observations: the median of the latest, so that a stall of the machine does not show.

    Needs no lock: its lists are replaced, never changed, and of two threads at once one observation may be lost.
    """

    def __init__(self, begin: float) -> None:
        self._begin = [begin] * BEGINNINGS
        self._seen = self._begin
        self._missed = 0

    @property
    def value(self) -> float:
        return median(self._seen)

    def add(self, observed: float) -> None:
        self._seen = [*self._seen, max(0.0, observed)][-SEEN:]
        self._missed = 0

    def missed(self) -> None:
        """Another kind of work was done instead. After `SEEN` times in a row what was observed is forgotten: else a slow spell would
        rule this kind out for good, since nothing more would be seen of it."""
        self._missed += 1
        if self._missed >= SEEN:
            self._seen, self._missed = self._begin, 0

"""Estimated seconds of a plan: rows computed, bytes loaded, overhead of a blend.

On a CPU a row attends only to its past: half of the prompt in the mean, and more behind a prefix.
Rows behind a prefix and rows of a blend need an explicit mask, which is slower than the causal one
of a whole prompt. A very short prefix therefore makes a long prompt slower.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np


@dataclass(frozen=True)
class ReuseCosts:
    """Constants of one model on one machine.

    Attributes
    ----------
    row : float
        Seconds of one token in all layers, without attention to other tokens.
    pair : float
        Seconds of one token attending to another in all layers.
    byte : float
        Seconds of loading one byte of state.
    blend : float
        Seconds of overhead per token of a blended prompt: token map, moved keys, separate rows.
    whole : float
        Share of the prompt that a row attends to in the mean: half, or all of it if hidden keys are
        computed too.
    masked : float
        Cost of a pair with an explicit mask, relative to one without.
    token_bytes : float
        Bytes of one token's state.
    snapshot_bytes : float
        Bytes of the fixed state behind a token, of which each snapshot holds a copy; 0 without any.
    """

    row: float
    pair: float = 0.0
    byte: float = 0.0
    blend: float = 0.0
    whole: float = 0.5
    masked: float = 1.0
    token_bytes: float = 0.0
    snapshot_bytes: float = 0.0

    def full(self, tokens: int) -> float:
        """Return the seconds of a prompt without any state."""
        return tokens * (self.row + self.whole * tokens * self.pair)

    def rows(self, rows: float, tokens: int, prefix_tokens: int = 0) -> float:
        """Return the seconds to compute some rows of a prompt with the state of the others.

        Parameters
        ----------
        rows : float
            Computed rows, all behind the first `prefix_tokens` tokens.
        tokens : int
            Tokens of the prompt.
        """
        # Rows behind a prefix see all of it: half of the rest, and the whole prefix.
        keys = self.whole * tokens + (1 - self.whole) * prefix_tokens
        return rows * (self.row + keys * self.masked * self.pair)

    def load(self, tokens: int) -> float:
        """Return the seconds to load the state of some tokens."""
        return tokens * self.token_bytes * self.byte

    def prefix(self, prefix_tokens: int, tokens: int) -> float:
        """Return the seconds of a prompt from the state of its first `prefix_tokens` tokens."""
        return self.rows(tokens - prefix_tokens, tokens, prefix_tokens) + self.load(prefix_tokens)

    def prefix_saves(self, prefix_tokens: int, base_tokens: int, tokens: int) -> bool:
        """Return whether a prefix of `prefix_tokens` is faster than one of `base_tokens` tokens.

        Full computation must be slower, too.
        """
        return self.prefix(prefix_tokens, tokens) < min(
            self.prefix(base_tokens, tokens), self.full(tokens)
        )

    def blending(self, rows: float, tokens: int, loaded: int) -> float:
        """Return the seconds of a blend.

        Parameters
        ----------
        rows : float
            Computed rows, the mean over layers.
        tokens : int
            Tokens of the prompt.
        loaded : int
            Tokens of the donors.
        """
        return self.rows(rows, tokens) + tokens * self.blend + self.load(loaded)

    def max_rows(self, seconds: float, tokens: int, loaded: int) -> float:
        """Return the maximum rows of a blend within `seconds`.

        The number is negative if a blend takes more time without any computed row.

        Parameters
        ----------
        seconds : float
            Time that the blend may take.
        tokens : int
            Tokens of the prompt.
        loaded : int
            Tokens of the donors.
        """
        spare_seconds = seconds - self.blending(0, tokens, loaded)
        return spare_seconds / self.rows(1, tokens) if self.row or self.pair else float(tokens)

    def fixed(self, constants: tuple[float, ...]) -> "ReuseCosts":
        """Return a copy with `row, pair, byte, blend` from a setting."""
        row, pair, byte, blend = constants
        return replace(self, row=row, pair=pair, byte=byte, blend=blend)


SEEN = 31
"""Observations that a rate remembers."""

BEGINNINGS = 3
"""Observations that a rate's first value counts for: one slow first request changes nothing."""


class RunningMedian:
    """Running median of the latest observations, robust against a stall of the machine.

    Lock-free: its lists are replaced, never changed. Two threads at once may lose one observation.
    """

    def __init__(self, begin: float) -> None:
        self._begin = [begin] * BEGINNINGS
        self._seen = self._begin
        self._missed = 0

    @property
    def value(self) -> float:
        """Median of the remembered observations."""
        return median(self._seen)

    def add(self, observed: float) -> None:
        """Add an observation."""
        # Below 0 where the estimate of the other parts was too high: then it costs nothing.
        self._seen = [*self._seen, max(0.0, observed)][-SEEN:]
        self._missed = 0

    def note_unused(self) -> None:
        """Note that other work was chosen.

        `SEEN` times in a row forget the observations. A slow spell would rule the work out for good
        otherwise.
        """
        self._missed += 1

        if self._missed >= SEEN:
            self._seen, self._missed = self._begin, 0


FIRST, MORE = 8, 64
"""Rows of the first timed passes, and of the next ones.

The next ones follow if the first take at most `LIMIT` seconds together.
"""

LIMIT = 0.3
"""Seconds that all timed passes may take."""
PASSES = 2
"""Timed passes of one length, of which the fastest counts."""
COUNTED = 5e-11
"""Seconds of an operation where nothing can be timed: 20 GFLOP/s, about a core of a CPU."""

BLEND_ROWS = 0.05
"""Rows charged for a token of a blend, beside the computed ones, until a blend was observed."""

COPIES = 3
"""Passes over each loaded byte: reading, checking and moving."""

MIN_SECONDS = 0.05
"""Least seconds of an observation. A shorter one is mostly the call and tells nothing of rows."""

MIN_BYTES = 1 << 20
"""Least bytes of a load that is observed."""

MASKED = 1.3
"""`ReuseCosts.masked` of torch's attention on a CPU, in pieces (`hidden_keys`).

It is 1.2 to 1.5 with SmolLM2's heads and 1,300 tokens.
"""


class CostMeter:
    """Costs of one model: counted from its shape, timed once, corrected by requests.

    Until `time` is called, costs are counted as if all machines were equally fast and only rows
    took time.

    Parameters
    ----------
    shape : ReuseCosts
        Costs in floating-point operations where `ReuseCosts` has seconds, without embeddings.
    forward : Callable[[int], object], optional
        Function that computes that many rows without state. With None nothing is timed.
    """

    def __init__(self, shape: ReuseCosts, forward: Callable[[int], object] | None) -> None:
        self.shape = shape
        self.timed = False

        self._forward = forward
        self._operation, self._byte, self._blend = (
            RunningMedian(COUNTED),
            RunningMedian(0.0),
            RunningMedian(BLEND_ROWS),
        )

    def time(self) -> None:
        """Time the model and the memory once, in a fraction of a second."""
        if not self.timed and self._forward is not None:
            self._operation = RunningMedian(self._operation_seconds(self._forward))
            self._byte = RunningMedian(COPIES * _copy_seconds())
        self.timed = True

    def costs(self) -> ReuseCosts:
        """Return the costs as they are known now."""
        # The shape's ratios are fixed. One measured speed turns them into seconds.
        operation, shape = self._operation.value, self.shape

        row, pair = operation * shape.row, operation * shape.pair
        return replace(
            shape, row=row, pair=pair, byte=self._byte.value, blend=row * self._blend.value
        )

    def observe_prompt(self, rows: int, tokens: int, seconds: float) -> None:
        """Update the measured speed from one prefill that took at least `MIN_SECONDS`.

        A prefill without reuse also ages the observations of blends and loads.

        Parameters
        ----------
        rows : int
            Computed tokens; the state of the first `tokens - rows` was reused.
        tokens : int
            Tokens of the prompt.
        seconds : float
            Time of the prefill.
        """
        if seconds >= MIN_SECONDS:
            self._operation.add(seconds / self._operations(rows, tokens))

        # Neither blends nor loads were chosen: old observations of them should not rule for ever.
        if rows == tokens:
            self._blend.note_unused()
            self._byte.note_unused()

    def observe_blend(self, rows: float, tokens: int, seconds: float) -> None:
        """Correct the overhead of blends by a prefill that took at least `MIN_SECONDS`.

        Parameters
        ----------
        rows : float
            Computed rows, the mean over layers.
        tokens : int
            Tokens of the prompt.
        seconds : float
            Time of the prefill.
        """
        if seconds >= MIN_SECONDS:
            blend_seconds = seconds - self.costs().rows(rows, tokens)
            self._blend.add(blend_seconds / (self._operation.value * tokens * self.shape.row))

    def observe_load(self, nbytes: int, seconds: float) -> None:
        """Correct the speed of loading by a load of at least `MIN_BYTES` into the engine."""
        if nbytes >= MIN_BYTES:
            self._byte.add(seconds / nbytes)

    def _operations(self, rows: int, tokens: int) -> float:
        return (
            self.shape.full(tokens) if rows == tokens else self.shape.prefix(tokens - rows, tokens)
        )

    def _operation_seconds(self, forward: Callable[[int], object]) -> float:
        """Return the seconds of an operation: the best of a few passes, after a short warm-up."""
        forward(FIRST)

        # The least of a few: other work of the machine only ever adds time.
        rows, seconds = FIRST, min(_seconds(forward, FIRST) for _ in range(PASSES))

        # More rows measure better, where the model is fast enough to afford them.
        if seconds * PASSES * MORE / FIRST <= LIMIT:
            rows, seconds = MORE, min(_seconds(forward, MORE) for _ in range(PASSES))
        return max(seconds, 1e-9) / self._operations(rows, rows)


def _seconds(forward: Callable[[int], object], rows: int) -> float:
    began = time.perf_counter()
    forward(rows)
    return time.perf_counter() - began


def _copy_seconds() -> float:
    """Return the seconds to copy a byte in memory."""
    source = np.ones(4 << 20, np.uint8)

    # Its pages come with the first copy: the least of three leaves that one out.
    target = np.empty_like(source)

    best = min(_seconds(lambda _: np.copyto(target, source), 0) for _ in range(3))
    return best / source.nbytes

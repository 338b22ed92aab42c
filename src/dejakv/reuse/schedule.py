"""How many rows each layer computes. A schedule is a list of shares, one a layer, that never grows with depth."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dejakv.errors import ConfigError

ScheduleName = Literal["constant", "linear", "exponential"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@dataclass(frozen=True)
class Schedule:
    """Share of the prompt's rows that each layer computes, first layer first."""

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares:
            raise ConfigError("a schedule needs one share a layer: it has none")
        if not all(0.0 <= share <= 1.0 for share in self.shares):
            raise ConfigError(f"schedule {self.shares}: shares lie between 0 and 1")
        if any(later > earlier + 1e-9 for earlier, later in zip(self.shares, self.shares[1:], strict=False)):
            raise ConfigError(
                f"schedule {self.shares} grows: a row that a layer did not compute has no input for the next one"
            )

    @property
    def mean(self) -> float:
        """Share over all layers."""
        return sum(self.shares) / len(self.shares)

    def rows(self, layer: int, tokens: int, exact: int = 0) -> int:
        """How many of `tokens` rows the layer computes: at least the last one. The share is of the rows behind the first
        `exact`, which are computed in complete layers alone."""
        share = self.shares[layer]
        return tokens if share >= 1.0 else max(1, round(share * (tokens - exact)))


def constant(layers: int, share: float, *, complete: int = 0) -> Schedule:
    """The same share in all layers but the first `complete`, which are computed completely."""
    _check(layers, complete)
    return Schedule((1.0,) * complete + (share,) * (layers - complete))


def linear(layers: int, high: float, low: float, *, complete: int = 0) -> Schedule:
    """From `high` in the first partial layer to `low` in the last, in a straight line."""
    _check(layers, complete)
    steps = layers - complete
    return Schedule((1.0,) * complete + tuple(high + (low - high) * i / max(1, steps - 1) for i in range(steps)))


def exponential(layers: int, high: float, low: float, *, complete: int = 0) -> Schedule:
    """From `high` to `low` by a constant factor a layer (SemShareKV, arXiv 2509.24832: shallow layers need more)."""
    _check(layers, complete)
    steps = layers - complete
    floor = max(low, 1e-6)
    decay = math.log(max(high, floor) / floor) / max(1, steps - 1)
    return Schedule((1.0,) * complete + tuple(min(1.0, high * math.exp(-decay * i)) for i in range(steps)))


def with_mean(name: str, layers: int, mean: float, *, complete: int = 0, spread: float = 3.0) -> Schedule:
    """The named schedule whose mean over all layers is `mean`; with decay, the first partial layer has `spread` times the
    last one's share. A mean that the complete layers alone exceed gives the smallest schedule there is.

    Raises: ConfigError for an unknown name.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"schedule {name!r} is unknown: choose one of {', '.join(SCHEDULES)}, or give a list of shares"
        )
    _check(layers, complete)
    left = max(0.0, mean * layers - complete) / max(1, layers - complete)
    if left >= 1.0 or layers == complete:
        return Schedule((1.0,) * layers)
    if name == "constant" or left == 0.0:
        return constant(layers, left, complete=complete)
    make = linear if name == "linear" else exponential
    low, high = 0.0, 1.0
    for _ in range(40):  # the mean grows with the scale: halve the interval
        middle = (low + high) / 2
        trial = make(layers, middle, middle / spread, complete=complete)
        low, high = (middle, high) if trial.mean < mean else (low, middle)
    return make(layers, high, high / spread, complete=complete)


def parse(text: str, layers: int) -> Schedule:
    """A per-layer list such as `1,0.3,0.2`; the last share holds for the layers not named."""
    try:
        given = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"schedule {text!r}: give shares between 0 and 1, separated by commas") from error
    if len(given) > layers:
        raise ConfigError(f"schedule {text!r} names {len(given)} layers, the model has {layers}")
    return Schedule(tuple(given + given[-1:] * (layers - len(given))))


def _check(layers: int, complete: int) -> None:
    if layers < 1 or not 0 <= complete <= layers:
        raise ConfigError(f"{complete} complete layers of {layers}: give between 0 and the number of layers")

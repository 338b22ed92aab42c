"""Requests of `get_or_compute`, and the work of a leader."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.encoder_cache.block import Resolution, VisualEmbeddingBlock
from dejakv.encoder_cache.eviction import Key
from dejakv.encoder_cache.single_flight import Flight
from dejakv.errors import InputError


@dataclass(frozen=True)
class Wanted:
    """A wanted output, and its labels in case it must be computed. `place`: see EncoderView."""

    key: Key
    resolution: Resolution | None = None
    encoder_model: str = ""
    place: Callable[[Any], Any] | None = None


@dataclass(eq=False)
class Errand:
    """One key to lead for: `recalled` from the tier, or else `output` from the encoder, which took `seconds`.

    index  index of the key among the caller's
    begun  whether the end of the flight is assured
    """

    index: int
    wanted: Wanted
    flight: Flight
    recalled: VisualEmbeddingBlock | None = None
    output: Any = None
    seconds: float = 0.0
    begun: bool = False


class Batch:
    """The errands that need the encoder, run together; its time is shared evenly among them."""

    def __init__(self, errands: Sequence[Errand]) -> None:
        self._errands = [errand for errand in errands if errand.recalled is None]
        self._started = time.perf_counter()

    @property
    def indices(self) -> list[int]:
        """Indices of the caller's keys to encode; empty if the tier had all."""
        return [errand.index for errand in self._errands]

    def deliver(self, outputs: Any) -> None:
        """Takes the encoder's result: one embedding for each of `indices`. Raises InputError for another number."""
        seconds = time.perf_counter() - self._started
        if len(outputs) != len(self._errands):
            raise InputError(
                f"`compute` was asked for {len(self._errands)} embeddings and returned {len(outputs)}: "
                "return one for each index, in their order"
            )
        for errand, output in zip(self._errands, outputs, strict=True):
            errand.output = output
            errand.seconds = seconds / len(self._errands)

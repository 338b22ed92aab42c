"""Tokens or characters of prompts that an earlier prompt began with, by their order of arrival."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dejakv.decide.part_order import SeenPrompts
from dejakv.stabilize.rules import Rewritten

GROUP = 4
"""Characters that count as one token where there is no tokenizer."""

MAX_CHARACTERS = 1_000_000
"""First characters of a prompt that are measured."""


@dataclass(frozen=True)
class PrefixGain:
    """Lengths of a prompt and of its prefixes, in tokens or characters.

    Attributes
    ----------
    length : int
        Of the prompt's names and texts, without the template's, to the first million characters.
    given, sent : int
        In a prefix of an earlier prompt: as requests came, and as they were sent.
    """

    length: int
    given: int
    sent: int


class PrefixMeter:
    """Memory of prompts as they came and as they were sent. Thread-safe.

    Parameters
    ----------
    tokenize : callable, optional
        Returns the token ids of a text; without it characters are counted.
    """

    def __init__(self, tokenize: Callable[[str], Sequence[int]] | None = None) -> None:
        self.unit = "characters" if tokenize is None else "tokens"
        self._tokenize = tokenize or _groups
        self._scale = GROUP if tokenize is None else 1
        self._given, self._sent = SeenPrompts(), SeenPrompts()

    def measure(
        self, rewritten: Rewritten, partition: str = "", *, remember: bool = True
    ) -> PrefixGain:
        """Count a prompt's prefixes, and remember it."""
        given_ids = self._tokenize(rewritten.given[:MAX_CHARACTERS])
        sent_ids = (
            self._tokenize(rewritten.text[:MAX_CHARACTERS]) if rewritten.changed else given_ids
        )
        given = self._given.prefix_length(given_ids, partition)
        sent = self._sent.prefix_length(sent_ids, partition)
        if remember:
            self._given.add(given_ids, partition)
            self._sent.add(sent_ids, partition)
        return PrefixGain(len(sent_ids) * self._scale, given * self._scale, sent * self._scale)


def _groups(text: str) -> Sequence[int]:
    """Return a number for each four characters."""
    letters = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    padded = np.pad(letters, (0, -len(letters) % GROUP)).reshape(-1, GROUP)
    weighted = padded * np.array([1, 1_000_003, 69_069, 2_654_435_761], "<u4")
    return array("I", weighted.sum(axis=1, dtype="<u4").tobytes())

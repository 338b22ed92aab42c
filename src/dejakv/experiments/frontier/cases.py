"""The interface of a frontier's cases: donors, the changed target, and the right answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Encode = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A changed prompt, and its donors, whose state is available. Token ids throughout.

    answer      first tokens of the right answer, None without a label
    old_answer  the right answer for the donor, if the change made it wrong
    """

    kind: str
    number: int
    target: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...] | None
    old_answer: tuple[int, ...] | None


class Cases(Protocol):
    """Makes cases. Each is determined by kind, number, tokenizer and seed.

    kinds  of change
    steps  tokens of full computation's answer along which ways of blending are compared
    """

    kinds: Sequence[str]
    steps: int

    def settings(self) -> dict[str, object]:
        """Other settings of the cases, for the folder's record."""
        ...

    def make(self, kind: str, number: int, encode: Encode, seed: int) -> Case: ...

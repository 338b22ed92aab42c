"""The seam of a frontier's cases: what changed between donors and target, and which answer is right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Encode = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A changed prompt, and the donors whose state is at hand. Token ids throughout.

    answer      first tokens of the right answer, None where there is no label
    old_answer  what was right for the donor, where the change made it wrong
    """

    kind: str
    number: int
    target: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...] | None
    old_answer: tuple[int, ...] | None


class Cases(Protocol):
    """Makes cases. Each follows from kind, number, tokenizer and seed alone.

    kinds  of change
    steps  tokens of full computation's answer along which ways of blending are compared
    """

    kinds: Sequence[str]
    steps: int

    def settings(self) -> dict[str, object]:
        """What else the cases depend on, for the folder's record."""
        ...

    def make(self, kind: str, number: int, encode: Encode, seed: int) -> Case: ...

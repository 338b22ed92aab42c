"""Texts of a prompt whose order is free: where they stand, and the prompt with another order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.errors import InputError

MAX_PARTS = 256
MAX_PLACES = 32
"""Places of the first part that are tried."""


@dataclass(frozen=True)
class Frame:
    """A prompt with parts: `before`, the parts with `between` between them, `after`."""

    before: str
    between: str
    after: str
    parts: tuple[str, ...]

    def prompt(self, order: Sequence[int]) -> str:
        """The prompt with its parts in this order."""
        return self.opening(order) + self.after

    def opening(self, order: Sequence[int]) -> str:
        """The prompt up to the end of the parts that are named."""
        return self.before + self.between.join(self.parts[number] for number in order)


def check_parts(parts: Sequence[Any]) -> tuple[str, ...]:
    """The parts. Raises: InputError for none, too many, an empty one, or one given twice."""
    if isinstance(parts, str) or not all(isinstance(part, str) for part in parts):
        raise InputError("parts are a list of texts: give each passage as a string of its own")
    if not parts:
        raise InputError("order='free' needs the parts whose order is free: give parts=[...], or leave the order out")
    if len(parts) > MAX_PARTS:
        raise InputError(f"{len(parts)} parts are too many: give {MAX_PARTS} at most, or join some")
    if not all(part.strip() for part in parts):
        empty = next(number for number, part in enumerate(parts) if not part.strip())
        raise InputError(f"part {empty} is empty: leave it out")
    if len(set(parts)) < len(parts):
        twice = next(number for number, part in enumerate(parts) if part in parts[:number])
        raise InputError(f"part {twice} is given twice: leave one out")
    return tuple(parts)


def frame_of(prompt: str, parts: Sequence[str]) -> Frame:
    """Finds the parts in a prompt.

    Raises: InputError for parts that are wrong in themselves, or do not stand in the prompt as they are given.
    """
    given = check_parts(parts)
    for start in _places(prompt, given[0]):
        between = _between(prompt, given, start + len(given[0]))
        if between is None:
            continue
        joined = between.join(given)
        if prompt.startswith(joined, start):
            return Frame(prompt[:start], between, prompt[start + len(joined) :], given)
    raise InputError(
        "the parts do not stand in the prompt in the order given, with the same text between them: give them word for word as the "
        "prompt has them, template applied"
    )


def _places(prompt: str, part: str) -> Iterator[int]:
    start = prompt.find(part)
    for _ in range(MAX_PLACES):
        if start < 0:
            return
        yield start
        start = prompt.find(part, start + 1)


def _between(prompt: str, parts: Sequence[str], end: int) -> str | None:
    if len(parts) == 1:
        return ""
    start = prompt.find(parts[1], end)
    return None if start < 0 else prompt[end:start]

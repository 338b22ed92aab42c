"""The interface between long work and the terminal: the present stage, and each result as it arrives."""

from typing import Protocol

from dejakv.experiments.summary import Row


class Watch(Protocol):
    """Observer of a run's stages and samples. It never changes a result."""

    def stage(self, text: str) -> None:
        """The stage that begins now, in a few words: `loading smollm2-135m`."""
        ...

    def sample(self, done: int, total: int, row: Row | None) -> None:
        """`done` of `total` samples are finished; `row` is the last one, None without arms (a dry run)."""
        ...


class Silent:
    """A watch that does nothing."""

    def stage(self, text: str) -> None:
        """See Watch."""

    def sample(self, done: int, total: int, row: Row | None) -> None:
        """See Watch."""

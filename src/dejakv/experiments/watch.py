"""The seam between long work and the terminal: what is going on, and each result as it comes."""

from typing import Protocol

from dejakv.experiments.summary import Row


class Watch(Protocol):
    """Told of a run's stages and samples. It never changes a result."""

    def stage(self, text: str) -> None:
        """What begins now, in a few words: `loading smollm2-135m`."""
        ...

    def sample(self, done: int, total: int, row: Row | None) -> None:
        """`done` of `total` samples are finished; `row` is the last one, None where there are no arms (a dry run)."""
        ...


class Silent:
    """Nobody watches."""

    def stage(self, text: str) -> None:
        """See Watch."""

    def sample(self, done: int, total: int, row: Row | None) -> None:
        """See Watch."""

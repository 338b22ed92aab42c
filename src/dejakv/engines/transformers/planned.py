"""A prompt's run from other prompts' state, as the engine's `generate` takes it."""

from typing import Any, Protocol

from dejakv.engines.base import ComputedRows
from dejakv.reuse.blend import BlendReport


class Planned(Protocol):
    """Single use: `generate` completes the state by a prefill.

    cache  a `Cache` that holds the state
    label  stands before the answer; empty for an ordinary one
    """

    cache: Any
    label: str

    def computed_tokens(self) -> int:
        """After the run: prompt rows that were computed, the mean over layers rounded up."""
        ...

    def priced_rows(self) -> float:
        """After the run: rows that it took as long as, in `Costs`."""
        ...

    def rows(self) -> ComputedRows | None:
        """After the run: what later blends may take from it."""
        ...

    def told(self, report: BlendReport) -> BlendReport:
        """After the run: the report, with the rows of each layer."""
        ...

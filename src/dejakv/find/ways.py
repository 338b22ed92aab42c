"""How a request can be run."""

from dataclasses import dataclass

from dejakv.levels.base import Match
from dejakv.records import Method
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class Plan:
    """How a request is going to run.

    method   `none`, `prefix`, `exact`, `adopt` or `blend`
    donors   whose state is used, best first (more than one only for blend)
    reused   prompt tokens that are not computed (for blend: an estimate made before the token map is known)
    reason   why a donor that was found is not used, else empty
    kept     tokens of an exact prefix that a blend leaves as they are
    like     how many donors are like the prompt beside others that hold copied text
    """

    method: Method
    donors: tuple[ChunkMeta, ...] = ()
    match: Match | None = None
    reused: int = 0
    reason: str = ""
    kept: int = 0
    like: int = 0

    @property
    def approximate(self) -> bool:
        return self.method in ("adopt", "blend")

    @property
    def name(self) -> str:
        """The method in words."""
        if self.method == "blend":
            return f"blend{' with like text' if self.like else ''}{' behind the exact prefix' if self.kept else ''}"
        return {"none": "full", "prefix": "exact prefix"}.get(self.method, self.method)

    @property
    def loaded(self) -> int:
        """Tokens of the donors, all of which are loaded."""
        return sum(meta.num_tokens for meta in self.donors)

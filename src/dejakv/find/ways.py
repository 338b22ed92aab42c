"""How a request can be run."""

from dataclasses import dataclass

from dejakv.levels.base import Match
from dejakv.records import APPROXIMATE, PIECEWISE, Method
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class Plan:
    """How a request is going to run.

    method   `none`, `prefix`, `exact`, `adopt`, `blend` or `top_layer`
    donors   whose state is used, best first (more than one only for piecewise methods)
    reused   prompt tokens that are not computed (for piecewise methods: an estimate made before the token map is known)
    reason   why a donor that was found is not used, else empty
    kept     tokens of an exact prefix that a blend leaves as they are
    like     how many donors are like the prompt beside others that hold copied text
    seams    of a blend: stretches of the prompt behind `kept` that stand in donors, as far as they are known
    """

    method: Method
    donors: tuple[ChunkMeta, ...] = ()
    match: Match | None = None
    reused: int = 0
    reason: str = ""
    kept: int = 0
    like: int = 0
    seams: int = 0

    @property
    def approximate(self) -> bool:
        return self.method in APPROXIMATE

    @property
    def piecewise(self) -> bool:
        """See `records.PIECEWISE`."""
        return self.method in PIECEWISE

    @property
    def name(self) -> str:
        """The method in words."""
        if self.method == "blend":
            return f"blend{' with like text' if self.like else ''}{' behind the exact prefix' if self.kept else ''}"
        return {"none": "full", "prefix": "exact prefix", "top_layer": "top layer"}.get(self.method, self.method)

    def loaded(self, tokens: int) -> int:
        """Tokens of which state is loaded for a prompt of so many: a blend reads the rows that it uses."""
        held = sum(meta.num_tokens for meta in self.donors)
        return min(held, tokens) if self.method == "blend" else held

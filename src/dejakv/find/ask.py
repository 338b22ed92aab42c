"""How a caller wants a request to be found: its own choice, else the cache's settings."""

from dataclasses import dataclass
from typing import Literal

from dejakv.config import ReuseMethod, SemanticCacheConfig
from dejakv.request import Request

Mode = Literal["off", "exact", "adopt", "blend"]


@dataclass(frozen=True)
class Ask:
    """What a request may be given.

    mode       `off` reuses nothing but exact prefixes and is not compared; `exact`, `adopt`, `blend`: see `ReuseMethod`
    threshold  least score of a donor: the cosine of similar text, or the share of the prompt that is copied text; it can only
               tighten what the cache is set to
    donor      id of the only donor to be used beside exact ones; the caller vouches for it, so no guard is asked. It must be
               of the request's own partition and epoch
    no_store   nothing of this request is kept
    donors     of how many prompts a blend takes state at most; None: of as many as the settings say
    similar    False leaves out the levels: exact prefixes and equal prompts alone, found without comparing text
    """

    mode: Mode = "exact"
    threshold: float | None = None
    donor: str | None = None
    no_store: bool = False
    similar: bool = True
    donors: int | None = None

    @classmethod
    def of(
        cls, request: Request, config: SemanticCacheConfig, *, no_store: bool = False, donors: int | None = None
    ) -> "Ask":
        """The request's own choice where it has one, the cache's elsewhere."""
        return cls(request.reuse or config.reuse, request.threshold, no_store=no_store, donors=donors)

    @property
    def method(self) -> ReuseMethod:
        """The most that may be done with a donor."""
        return "exact" if self.mode == "off" else self.mode

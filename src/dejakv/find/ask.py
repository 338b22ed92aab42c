"""How a caller wants a request to be found: its own choice, else the cache's settings."""

from dataclasses import dataclass

from dejakv.config import SemanticCacheConfig
from dejakv.config.reuse import ReuseMethod
from dejakv.records import PIECEWISE
from dejakv.request import Request, ReuseMode


@dataclass(frozen=True)
class Ask:
    """What a request may be given.

    mode       `off` reuses nothing but exact prefixes and is not compared; others: see `ReuseMethod`
    threshold  least score of a donor: the cosine of similar text, or the share of the prompt that is copied text; it can only
               tighten what the cache is set to
    named      ids of the only donors to be used beside exact ones, the best first; the caller vouches for them, so no guard is
               asked. They must be of the request's own partition and epoch
    no_store   nothing of this request is kept
    donors     of how many prompts a piecewise method takes state at most; None: of as many as the settings say
    similar    False leaves out whatever is not exact: exact prefixes and equal prompts alone
    levels     False leaves out the levels, which may run an encoder: copied text is still looked for
    tells_first_token  the engine lets a blend be declined by its first token, so that an error bound may wait for it
    """

    mode: ReuseMode = "exact"
    threshold: float | None = None
    named: tuple[str, ...] = ()
    no_store: bool = False
    similar: bool = True
    donors: int | None = None
    levels: bool = True
    tells_first_token: bool = False

    @classmethod
    def of(cls, request: Request, config: SemanticCacheConfig, *, donors: int | None = None) -> "Ask":
        """The request's own choice where it has one, the cache's elsewhere."""
        return cls(request.reuse or config.reuse, request.threshold, no_store=request.no_store, donors=donors)

    @property
    def method(self) -> ReuseMethod:
        """The most that may be done with a donor."""
        return "exact" if self.mode == "off" else self.mode

    @property
    def piecewise(self) -> bool:
        """Whether state may be taken token by token, from several donors, and what differs computed."""
        return self.method in PIECEWISE

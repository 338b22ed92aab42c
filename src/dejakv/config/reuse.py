"""Settings of reuse: what may be done with a donor, and what it must be worth."""

from dataclasses import dataclass
from typing import Literal

from dejakv.config.blend import BlendSettings
from dejakv.errors import ConfigError
from dejakv.settings import Seconds, shown

ReuseMethod = Literal["exact", "adopt", "blend"]
PrunePolicy = Literal["none", "attention", "snapkv", "random"]


@dataclass(frozen=True)
class ReuseSettings(BlendSettings):
    """What a request may be given.

    reuse           `exact`: only equal tokens and media; `adopt`: run a similar donor's prompt instead; `blend`: take a similar
                    donor's KV token by token and recompute the rest
    free_order      parts of a prompt are rearranged where the request says that their order is free
    costs           seconds of a row, of a pair of tokens, of a byte loaded, of a token blended (see `dejakv.costs`), for runs
                    that must choose alike; empty: measured, which follows the machine
    prune           answers are decoded from the tokens that matter most, layer by layer (`reuse.prune.PruneConfig`), unless a
                    request asks for exact reuse; they are approximate
    """

    reuse: ReuseMethod = "exact"
    free_order: bool = True
    costs: tuple[Seconds, ...] = ()
    prune: PrunePolicy = "none"

    def check_costs(self) -> None:
        """Raises ConfigError for a wrong number of constants."""
        if len(self.costs) not in (0, 4):
            raise ConfigError(
                f"costs={shown(self.costs)} are {len(self.costs)} constants: give four, the seconds of a row, of a pair of tokens, "
                "of a byte loaded and of a token blended, or none to measure them"
            )

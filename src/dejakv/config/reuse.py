"""Settings of reuse: what may be done with a donor, and what it must be worth."""

from dataclasses import dataclass
from typing import Literal

from dejakv.config.blend import BlendSettings
from dejakv.errors import ConfigError
from dejakv.reuse.quality import TOP_LAYER_TAIL
from dejakv.settings import Positive, Seconds, shown

ReuseMethod = Literal["exact", "adopt", "blend", "top_layer"]
PrunePolicy = Literal["none", "attention", "snapkv", "random"]


@dataclass(frozen=True)
class ReuseSettings(BlendSettings):
    """What a request may be given.

    reuse           `exact`: only equal tokens and media; `adopt`: run a similar donor's prompt instead; `blend`: take a similar
                    donor's KV token by token and recompute the rest; `top_layer`: take the top layer's KV alone, in a
                    layer-condensed model (docs/sim-llm.md)
    unsound         `top_layer` with an ordinary model, for study: every answer that comes of it is labelled
    top_layer_tail  tokens at the end of a prompt that `top_layer` computes in any case: where the question stands
    free_order      parts of a prompt are rearranged where the request says that their order is free
    costs           seconds of a row, of a pair of tokens, of a byte loaded, of a token blended (see `dejakv.costs`), for runs
                    that must choose alike; empty: measured, which follows the machine
    prune           answers are decoded from the tokens that matter most, layer by layer (`reuse.prune.PruneConfig`), unless a
                    request asks for exact reuse; they are approximate
    """

    reuse: ReuseMethod = "exact"
    unsound: bool = False
    top_layer_tail: Positive = TOP_LAYER_TAIL
    free_order: bool = True
    costs: tuple[Seconds, ...] = ()
    prune: PrunePolicy = "none"

    def check_method(self) -> None:
        """Raises ConfigError for what does not go with the method."""
        if self.unsound and self.reuse != "top_layer":
            raise ConfigError(
                f"unsound=True is about reuse=top_layer, and reuse={self.reuse}: leave it out, or give top_layer"
            )
        if self.reuse == "top_layer" and self.prune != "none":
            raise ConfigError(
                f"prune={self.prune} drops rows of the state that reuse=top_layer takes from others: leave one of them out"
            )

    def check_costs(self) -> None:
        """Raises ConfigError for a wrong number of constants."""
        if len(self.costs) not in (0, 4):
            raise ConfigError(
                f"costs={shown(self.costs)} are {len(self.costs)} constants: give four, the seconds of a row, of a pair of tokens, "
                "of a byte loaded and of a token blended, or none to measure them"
            )

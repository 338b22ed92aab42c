"""Layout of a condensed model: which layer's KV each layer attends to.

The notation is that of the published checkpoints: `0_3_3_3_4`.
"""

import re
from dataclasses import dataclass
from typing import Any

from dejakv.errors import ConfigError


@dataclass(frozen=True)
class KVLayout:
    """Layer whose KV each layer attends to.

    A layer that attends to itself is ordinary. A layer that attends to a higher one is condensed:
    for a token, the KV of that layer exists only after the token has passed it, so a condensed
    layer sees earlier tokens alone.

    Attributes
    ----------
    targets : tuple[int, ...]
        `targets[i]` is the layer whose KV layer i attends to.
    """

    targets: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, layers: int) -> "KVLayout":
        """Parse `0_3_3_3_4`, one number a layer. A sliding window (`3s`) is refused.

        Raises
        ------
        ConfigError
            For another notation, another number of layers, or a target that does not attend to
            itself.
        """
        parts = text.split("_")
        if not all(re.fullmatch(r"\d+", part) for part in parts):
            raise ConfigError(
                f"the KV layout {text!r} cannot be read: give one layer number for each layer, "
                "joined by '_', for "
                f"example {'_'.join(map(str, range(layers)))!r} for an ordinary model"
            )

        targets = tuple(map(int, parts))
        if len(targets) != layers:
            raise ConfigError(
                f"the KV layout {text!r} names {len(targets)} layers, the model has {layers}: "
                "give a number for each"
            )

        for layer, target in enumerate(targets):
            if target >= layers or targets[target] != target:
                raise ConfigError(
                    f"in the KV layout {text!r} layer {layer} attends to layer {target}, which "
                    "has no KV of its own: "
                    "choose a layer that attends to itself"
                )

        return cls(targets)

    def __str__(self) -> str:
        return "_".join(map(str, self.targets))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.targets)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that compute KV. A cache holds no others."""
        return tuple(sorted(set(self.targets)))

    def attends_above(self, layer: int) -> bool:
        """Return whether a layer is condensed."""
        return self.targets[layer] > layer

    @property
    def loop(self) -> range:
        """Layers iterated by a prefill: from the first condensed one to the highest target.

        Without condensed layers there are none.
        """
        above = [i for i in range(self.layers) if self.attends_above(i)]
        return range(above[0], max(self.targets[i] for i in above) + 1) if above else range(0)

    @property
    def bottom(self) -> range:
        """Layers below the loop: all, if nothing is condensed."""
        return range(self.loop.start) if self.loop else range(self.layers)

    @property
    def top(self) -> range:
        """Layers above the loop."""
        return range(self.loop.stop, self.layers) if self.loop else range(0)

    @property
    def task_layers(self) -> tuple[int, ...]:
        """Layers whose KV a similar task supplies: with KV, from the first condensed layer on."""
        return tuple(i for i in self.kv_layers if self.loop and i >= self.loop.start)


def layout_of(model: Any) -> KVLayout | None:
    """Return the layout of a model with condensed layers; None for every other model."""
    layout = getattr(getattr(model, "model", None), "layout", None)
    return layout if isinstance(layout, KVLayout) and layout.loop else None

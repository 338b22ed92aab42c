"""A latent layer as flags name it: NAME:DIM[:THRESHOLD]."""

import math
from dataclasses import dataclass

from dejakv.config.text import SIMILARITY_THRESHOLD
from dejakv.errors import ConfigError


@dataclass(frozen=True)
class LayerSpec:
    """One latent layer.

    dim        components of its vectors; None (`auto`): those of the first vector that comes
    threshold  least cosine, in [-1, 1]; 0 is a threshold like any other, never "unset"
    weight     its share in the combination `mean`
    """

    name: str
    dim: int | None
    threshold: float = SIMILARITY_THRESHOLD
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name or ":" in self.name:
            raise ConfigError(f"a latent layer cannot be named {self.name!r}: give a name without a colon")
        if self.name == "mean":
            raise ConfigError("a latent layer cannot be named 'mean', which is the combination of all: rename it")
        if self.dim is not None and self.dim < 1:
            raise ConfigError(
                f"layer {self.name!r} has dimension {self.dim}: give the components of its vectors, or 'auto'"
            )
        if not -1.0 <= self.threshold <= 1.0:
            raise ConfigError(f"layer {self.name!r} has threshold {self.threshold}: give a cosine from -1 to 1")
        if not 0.0 < self.weight < math.inf:
            raise ConfigError(f"layer {self.name!r} has weight {self.weight}: give a number above 0")

    @classmethod
    def parse(cls, text: str) -> "LayerSpec":
        """`prompt:384`, `vision:512:0.82` or `prompt:auto:0.9`. Raises ConfigError naming what is wrong with it."""
        parts = [part.strip() for part in text.split(":")]
        if len(parts) not in (2, 3):
            raise ConfigError(
                f"embedding_layers: {text!r} (--embedding-layer) is not NAME:DIM[:THRESHOLD]: write for example vision:512:0.82"
            )
        name, dim = parts[0], parts[1]
        try:
            size = None if dim.lower() == "auto" else int(dim)
        except ValueError:
            raise ConfigError(
                f"embedding_layers: {text!r} (--embedding-layer): the dimension {dim!r} is no whole number: write for example {name}:512"
            ) from None
        try:
            threshold = float(parts[2]) if len(parts) == 3 else SIMILARITY_THRESHOLD
        except ValueError:
            raise ConfigError(
                f"embedding_layers: {text!r} (--embedding-layer): the threshold {parts[2]!r} is no number: write for example {name}:{dim}:0.82"
            ) from None
        return cls(name, size, threshold)

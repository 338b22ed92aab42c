"""Settings of finding: levels, indexes and encoders beside those of text."""

from dataclasses import dataclass
from typing import Literal

from dejakv.config.text import TextSettings
from dejakv.errors import ConfigError

MediaPolicy = Literal["exact", "similar", "ignore"]
LayerMatch = Literal["all", "any", "mean"]
IndexKind = Literal["flat", "hnsw", "lsh"]


@dataclass(frozen=True)
class FindSettings(TextSettings):
    """What donors are looked for. A threshold of 0 is a threshold: it accepts whatever is not opposed.

    media                 `exact`: never match across other media; `similar`: the vision layer decides; `ignore`: as the
                          prototypes did (wrong answers on other pictures; reports say so)
    exact_prefix, exact_text, semantic_text
                          levels of equal beginnings, equal text and similar text. `semantic_text` loads the `index_encoder`; None:
                          only where it is needed, which is for `adopt` and `top_layer`, for a blend without `copied_text`, and
                          wherever another encoder than the default is chosen
    image_encoder         of the layer `vision`: sentence-transformers name or folder of a CLIP model; `model`: the served model's
                          tower; None: CLIP if it can be loaded, else the tower (for a dimension `auto` the tower first)
    embedding_layers      latent layers as `NAME:DIM[:THRESHOLD]`
    embedding_hook        `none`, `prompt`, `vision`, `prompt_vision` or `package.module:factory`
    levels                further levels as `package.module:factory`, called with the config
    """

    media: MediaPolicy = "exact"
    exact_prefix: bool = True
    exact_text: bool = True
    semantic_text: bool | None = None
    image_encoder: str | None = None
    index: IndexKind = "flat"
    embedding_layers: tuple[str, ...] = ()
    embedding_hook: str = "none"
    embedding_match: LayerMatch = "all"
    levels: tuple[str, ...] = ()

    def check_layers(self) -> None:
        """Raises ConfigError where the media are left to a layer that is not there."""
        if self.media == "similar" and not any(layer.split(":")[0] == "vision" for layer in self.embedding_layers):
            raise ConfigError(
                "media='similar' lets the vision layer decide, but there is none: add vision:DIM:THRESHOLD to embedding_layers "
                "(--embedding-layer), and give embedding_hook (--embedding-hook) vision or prompt_vision"
            )

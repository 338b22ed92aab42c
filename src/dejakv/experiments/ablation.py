"""The ablation of the first prototype as a sweep: each level alone, over thresholds, for every given model.

Every run has exact prefixes; encoder outputs are kept in the fusion run alone. A model takes 16 runs: exact text only, fusion
(encoder outputs) only, semantic text at five thresholds, and a 3 x 3 grid of prompt and vision thresholds, in which the vision
layer decides about other pictures.
"""

from collections.abc import Sequence
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.presets import preset

SEMANTIC = (0.5, 0.6, 0.7, 0.8, 0.9)
LATENT = (0.7, 0.8, 0.9)
NO_PICTURE = 1
"""Bytes of encoder outputs in which none fits."""
KEPT = SemanticCacheConfig.encoder_bytes


def ablation(models: Sequence[str], dims: tuple[str, str] = ("384", "512"), **defaults: Any) -> dict[str, Any]:
    """A sweep's specification. `dims` are the dimensions of the prompt and the vision layer; `defaults` join every run.

    Raises: ConfigError for a model that is given twice.
    """
    experiments: list[dict[str, Any]] = []
    for model, name in zip(models, _folder_names(models), strict=True):
        off = {"model": model, "disable_semantic_cache": True, "disable_exact_cache": True}
        off |= {"embedding_layers": [], "embedding_hook": "none", "encoder_bytes": NO_PICTURE}
        experiments.append({**off, "name": f"{name}-exact", "disable_exact_cache": False})
        experiments.append({**off, "name": f"{name}-fusion", "enable_fusion_cache": True, "encoder_bytes": KEPT})
        experiments += [
            {**off, "name": f"{name}-semantic-{t}", "disable_semantic_cache": False, "similarity_threshold": t}
            for t in SEMANTIC
        ]
        experiments += [
            {
                **off,
                "name": f"{name}-latent-{prompt}-{vision}",
                "embedding_layers": [f"prompt:{dims[0]}:{prompt}", f"vision:{dims[1]}:{vision}"],
                "embedding_hook": "prompt_vision",
                "media": "similar",
            }
            for prompt in LATENT
            for vision in LATENT
        ]
    return {"defaults": {"reuse": "adopt", **defaults}, "experiments": experiments}


def _folder_names(models: Sequence[str]) -> list[str]:
    """A name of its own for each model: the last part of it, or all of it where two have the same."""
    if len(set(models)) < len(models):
        raise ConfigError("a model of the ablation is given twice: give each --model once")
    short = [model.rstrip("/").rsplit("/", 1)[-1] for model in models]
    return [
        name if short.count(name) == 1 else model.strip("/").replace("/", "-")
        for model, name in zip(models, short, strict=True)
    ]


def layer_dims(preset_name: str | None) -> tuple[str, str]:
    """The dimensions of the prompt and vision layers that a preset declares; MiniLM's and CLIP's if it has none."""
    layers: dict[str, str] = {"prompt": "384", "vision": "512"}
    if preset_name is not None:
        for layer in preset(preset_name)[1].get("embedding_layers", ()):
            name, dim = layer.split(":")[:2]
            layers[name] = dim
    return layers["prompt"], layers["vision"]

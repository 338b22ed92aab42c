"""A fetched GGUF as safetensors: read once, rounded to bfloat16, checked against the recorded digest."""

import hashlib
from pathlib import Path

from dejakv.errors import ModelError
from dejakv.models.gguf import load_gguf_model
from dejakv.models.recipe import WEIGHTS, Recipe


def convert(recipe: Recipe, gguf: Path, folder: Path) -> None:
    """Writes the weights into `folder`. The same GGUF gives the same bytes on every machine.

    bfloat16 is the type SmolLM2 was published in, and takes half the disk space of float32; its cost is in the model card.
    Raises: MissingExtraError, and ModelError if the result differs from the recorded weights.
    """
    import torch
    from safetensors.torch import save

    model = load_gguf_model(gguf)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }
    del model
    content = save(weights, metadata={"format": "pt"})
    if hashlib.sha256(content).hexdigest() != recipe.weights_sha256:
        import transformers

        raise ModelError(
            f"{recipe.name}: the installed versions give other weights than the recorded ones (transformers "
            f"{transformers.__version__}): install the versions that dejakv requires, and report this"
        )
    (folder / WEIGHTS).write_bytes(content)

"""The same model in another precision, to tell what a difference of answers means."""

import copy

import torch

from dejakv.engines.transformers.engine import TransformersEngine


def twin_of(engine: TransformersEngine) -> TransformersEngine:
    """The same weights in the other one of float32 and bfloat16, without an encoder registry; a copy of the model."""
    other = torch.bfloat16 if engine.model.dtype == torch.float32 else torch.float32
    model = copy.deepcopy(engine.model).to(other)
    return TransformersEngine(model, engine.tokenizer, engine.processor, check=False)

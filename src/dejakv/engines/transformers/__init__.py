"""The engine on Hugging Face transformers."""

from dejakv.engines.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]

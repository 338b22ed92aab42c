"""Engines, which run the model: `transformers` in this process, or vLLM."""

"""What runs the model: `transformers` in this process, or vLLM."""

"""Blends inside vLLM's worker."""

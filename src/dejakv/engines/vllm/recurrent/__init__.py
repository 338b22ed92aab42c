"""Recurrent layers in vLLM: their state at ends of blocks, stored as snapshots."""

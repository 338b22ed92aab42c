"""Method `top_layer` (Sim-LLM): reuse of the top layer's KV alone, in layer-condensed models."""

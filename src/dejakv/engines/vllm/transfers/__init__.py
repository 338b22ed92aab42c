"""The copies between vLLM's KV cache and the store: loads and saves."""

"""The HTTP server: SemShareKV's own endpoint, an OpenAI-compatible API, metrics and health."""

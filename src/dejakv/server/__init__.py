"""The HTTP server: SemShareKV's own endpoint, an OpenAI-compatible face, figures and health."""

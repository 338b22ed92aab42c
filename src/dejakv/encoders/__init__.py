"""What turns a request into vectors: texts, pictures, and hooks into the served model."""

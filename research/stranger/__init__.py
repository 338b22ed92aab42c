"""An attack on blends: a context whose state behind a shared passage steers other answers."""

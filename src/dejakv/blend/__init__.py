"""Blends: donors' KV entries token by token, with the other tokens recomputed."""

"""Vectors of a request: from its text, its pictures, and hooks into the served model."""

"""Levels, the ways to find a donor, in modules of their own by their cost."""

"""Data sets: generated ones that ship with the package, and loaders for what users have."""

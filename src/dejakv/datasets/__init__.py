"""Data sets: generated ones that ship with the package, and loaders for users' own data."""

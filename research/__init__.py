"""Measurements, studies and the training of the small models: run from a checkout, `python -m research.NAME`, not part of the package."""

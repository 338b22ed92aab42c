"""Measurements, studies and the training of the small models.

They run from a checkout, `python -m research.NAME`, and are not part of the package.
"""

"""Runs over a data set that compare the cache with its absence, and their reports."""

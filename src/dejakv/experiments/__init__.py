"""Runs over a data set that compare the cache with its absence, and the reports made of them."""

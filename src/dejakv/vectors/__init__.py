"""Nearest neighbours over normalized vectors, one kind of index a file."""

"""The work that reuse pays for, on a real language model.

It tells what blend saves beyond prefix caching, and what it changes.
"""

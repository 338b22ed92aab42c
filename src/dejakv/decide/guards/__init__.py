"""Guards, which judge whether a donor may be trusted.

The guard of a question's words has a module of its own, and so have the words.
"""

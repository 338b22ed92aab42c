"""Copied text: runs of tokens that a prompt shares with stored prompts, at whatever place.

Fingerprints propose the runs, and comparing the tokens verifies them.
"""

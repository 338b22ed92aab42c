"""Copied text: runs of tokens that stand in stored prompts, at whatever place, found by fingerprints and verified."""

"""Checkpoints for `dejakv.models`, which reads their folders; nothing here is code."""

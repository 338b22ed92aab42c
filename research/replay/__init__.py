"""Replays a trace of requests through eviction policies at a budget, without a model."""

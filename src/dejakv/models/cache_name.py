"""The name under which models of transformers take and return their cache."""

from dataclasses import fields

from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAME = next(
    field.name
    for field in fields(BaseModelOutputWithPast)
    if field.name in ("cache", "past_key_values")
)
"""`cache` since transformers 5.24, `past_key_values` before: keyword of `forward` and `generate`,
and field of their results."""

"""Fingerprints of what belongs to a loaded model: its kind, its tokenizer and its processor.

Everything that makes the same tokens give another state must change the epoch (`watch.ModelWatch` puts it together).
"""

import json
from collections.abc import Mapping
from typing import Any

import transformers

from dejakv.engines.transformers.kv import piece_of
from dejakv.identity import digest_of

LAYOUT = 2
"""Counted up when the stored state, or the way that it is fingerprinted, changes."""


def epoch_parts(model: Any, attention: str) -> Mapping[str, object]:
    """What every fingerprint of this model begins with. A model's code is that of the transformers release."""
    return {
        "layout": LAYOUT,
        "transformers": transformers.__version__,
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "piece": piece_of(model),
        "attention": attention,
    }


def tokenizer_digest(tokenizer: Any) -> str:
    """Vocabulary, special tokens, splitting rules and chat template."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = tokenizer.chat_template
    return digest_of(rules, str(tokenizer.special_tokens_map), json.dumps(template, sort_keys=True, default=str))


def processor_digest(processor: Any) -> str:
    """How pictures are cut, scaled and counted."""
    parts = [getattr(processor, name, None) for name in ("image_processor", "video_processor", "feature_extractor")]
    settings = [part.to_dict() for part in parts if part is not None]
    own = (
        {name: value for name, value in vars(processor).items() if isinstance(value, int | float | str | bool)}
        if processor
        else {}
    )
    return digest_of(json.dumps([settings, own], sort_keys=True, default=str)) if processor is not None else ""

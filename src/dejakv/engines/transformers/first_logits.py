"""A look at the first token's probabilities before the token is given to anybody, and the right to decline."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from dejakv.engines.base import Accept


class Declined(Exception):
    """The first token is not to be given; the message says why."""


class FirstLogits(LogitsProcessor):
    """Asks once, at the first step, and changes no score."""

    def __init__(self, accept: Accept) -> None:
        self._accept: Accept | None = accept

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        accept, self._accept = self._accept, None
        if accept is not None:
            reason = accept(scores[0].float().log_softmax(-1).cpu().numpy())
            if reason:
                raise Declined(reason)
        return scores


def asking(arguments: Mapping[str, Any], accept: Accept | None) -> dict[str, Any]:
    """Arguments of `generate` with which it asks."""
    if accept is None:
        return dict(arguments)
    held = arguments.get("logits_processor") or []
    return {**arguments, "logits_processor": LogitsProcessorList([FirstLogits(accept), *held])}

# pyright: reportMissingImports=false
"""The model's logits at each token of an answer, seen as vLLM samples from them, and answers along given tokens.

vLLM's own log probabilities of the whole vocabulary become Python numbers one by one, which takes longer than the step. A logits
processor sees the rows as tensors, and a copy of one is all that a measured request pays for. It runs in the engine's process.
"""

import itertools
import weakref
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

KEPT = 16
"""Tokens of an answer whose logits are kept: what `dejakv.experiments.fidelity` compares."""

_ARGUMENT = "dejakv_trace"
_numbers = itertools.count()
_open: "weakref.WeakValueDictionary[int, Trace]" = weakref.WeakValueDictionary()


class Trace:
    """One request's logits.

    forced  the answer that is given, whatever the model finds likelier; empty: its own
    rows    `[vocabulary]` float32 by the number of the answer's tokens before it
    """

    def __init__(self, forced: tuple[int, ...] = ()) -> None:
        self.forced = forced
        self.rows: dict[int, torch.Tensor] = {}
        self._number = next(_numbers)
        _open[self._number] = self

    @property
    def extra_args(self) -> dict[str, int]:
        """What marks a request as the traced one, in its `SamplingParams.extra_args`."""
        return {_ARGUMENT: self._number}

    def step(self, place: int, row: torch.Tensor) -> None:
        """Takes in the logits of the token after `place` tokens, and leaves those that vLLM is to sample from.

        A prompt that is computed in parts comes at place 0 once for each part; the last one counts.
        """
        if place < max(KEPT, len(self.forced)):
            self.rows[place] = row.detach().clone()
        if place < len(self.forced):
            row.fill_(-torch.inf)
            row[self.forced[place]] = 0.0


class TraceProcessor(LogitsProcessor):
    """Given to vLLM as one of its `logits_processors`. It touches no request but the traced ones."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._traced: dict[int, tuple[Trace, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._traced, batch_update, _traced)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (trace, answer) in self._traced.items():
            trace.step(len(answer), logits[index])
        return logits


def _traced(params: Any, _prompt: Any, answer: list[int]) -> tuple[Trace, list[int]] | None:
    trace = _open.get((params.extra_args or {}).get(_ARGUMENT, -1))
    return None if trace is None else (trace, answer)

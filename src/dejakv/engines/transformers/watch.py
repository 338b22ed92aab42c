"""Keeps a model's epoch true: a whole fingerprint at first, a cheap check before each use, a new one when that notices."""

import copy
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from dejakv.engines.transformers.fingerprint import epoch_parts, processor_digest, tokenizer_digest
from dejakv.engines.transformers.structure import Structure, by_length, changes_with_length
from dejakv.engines.transformers.weights import Weights, unreadable
from dejakv.identity import digest_of, epoch_of

_log = logging.getLogger(__name__)


class ModelWatch:
    """One model, its tokenizer and its processor. Used under the engine's lock.

    epoch          fingerprint of all that makes the same tokens give another state; empty where it cannot be told
    encoder_epoch  the same for a picture's features: whatever is not the language model
    reason         why it cannot be told

    trusted  modules and packages whose code counts as understood, by name
    """

    def __init__(self, model: Any, tokenizer: Any, processor: Any, attention: str, trusted: Iterable[str] = ()) -> None:
        self._model, self._tokenizer, self._processor, self._attention = model, tokenizer, processor, attention
        self._trusted = frozenset(trusted)
        self._told: set[str] = set()
        self._structure: Structure | None = None
        self._weights: Weights | None = None
        self._numerics: tuple[str, ...] = ()
        self._tokenizer_digest = ""
        self.epoch = self.encoder_epoch = self.reason = ""
        self.renew()

    def check(self, *, turn: bool = True) -> bool:
        """Compares the model with what its epoch stands for, and makes a new epoch if something changed (False then).

        turn  compare the next part of all weights too, besides every tensor's sample
        """
        structure = self._structure
        if structure is not None and self._numerics == self._process():
            same = structure.unchanged()
            weights = self._weights
            if weights is None:
                same = same and self.reason == self._why(structure)
            elif not weights.unchanged(structure.names, structure.tensors(), turn=turn):
                same, self._weights = False, None
            if same:
                return True
        self._renew()
        return False

    def renew(self) -> str:
        """Fingerprints everything anew and returns the epoch."""
        self._weights = None
        self._tokenizer_digest = tokenizer_digest(self._tokenizer)
        self._renew()
        return self.epoch

    def _renew(self) -> None:
        structure = self._structure = Structure(self._model, self._processor, self._trusted)
        self._rotary = [module for module in self._model.modules() if changes_with_length(module)]
        self._numerics = self._process()
        self.reason = self._why(structure)
        if self.reason:
            if self.reason not in self._told:
                self._told.add(self.reason)
                _log.warning("nothing is reused: %s", self.reason)
            self.epoch, self.encoder_epoch, self._weights = "", "", None
            return
        names, tensors = structure.names, structure.tensors()
        if self._weights is None or not self._weights.unchanged(names, tensors, turn=False):
            self._weights = Weights(names, tensors)
        parts = {
            **epoch_parts(self._model, self._attention),
            "structure": structure.digest,
            "numerics": self._numerics,
            "processor": processor_digest(self._processor),
        }
        self.epoch = epoch_of({**parts, "weights": self._weights.digest, "tokenizer": self._tokenizer_digest})
        self.encoder_epoch = epoch_of({**parts, "weights": self._weights.digest_where(_outside_the_language_model)})

    def momentary(self) -> str:
        """Why nothing can be reused or stored at this moment, whatever the model is; empty if nothing speaks against it."""
        if self._model.training:
            return "the model is in training mode: call model.eval()"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast is on"
        modes = [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
        if modes or torch._C._len_torch_dispatch_stack():
            return "a torch function mode or dispatch mode is on"
        return ""

    def _why(self, structure: Structure) -> str:
        return (
            self.momentary()
            or structure.foreign
            or self._unknown_tables()
            or unreadable(structure.names, structure.tensors())
        )

    def _unknown_tables(self) -> str:
        """Why it cannot be told how positions are rotated: by the length of the prompt, in code of the model's own."""
        config = self._model.config.get_text_config(decoder=True)
        for name in ("rope_parameters", "rope_scaling"):
            held = getattr(config, name, None) or {}
            for given in [held, *held.values()]:
                kind = str(given.get("rope_type") or given.get("type") or "") if isinstance(given, dict) else ""
                if by_length(kind) and not self._rotary:
                    return f"its rotary tables depend on the prompt's length ({kind}), and it makes them in its own way"
        return ""

    def _process(self) -> tuple[str, ...]:
        """What of the process decides how the model computes."""
        device = self._model.device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        backends: Any = torch.backends
        products = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        products += (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
        precisions = [str(part.fp32_precision).replace("none", "ieee") for part in products]  # unset is full precision
        return device, autocast, self.momentary(), *precisions

    @property
    def by_length(self) -> bool:
        """Whether the model rotates the same position otherwise in prompts of another length (longrope, dynamic NTK)."""
        return bool(self._rotary)

    def epoch_for(self, tokens: int) -> str:
        """The epoch of a prompt of so many tokens: with the rotary tables that the model would make for it now."""
        if not self._rotary or not self.epoch:
            return self.epoch
        return epoch_of({"model": self.epoch, "tables": [_table(module, tokens) for module in self._rotary]})

    def continues(self, held: int, tokens: int) -> bool:
        """Whether the model continues a prompt of so many tokens from `held` of them. Phi-3 computes all of a prompt anew that
        passes the limit of its short table from state that does not."""
        if not self._rotary:
            return True
        limit = getattr(self._model.config.get_text_config(decoder=True), "original_max_position_embeddings", None)
        return not limit or not held <= limit < tokens

    @contextmanager
    def tables_of(self, tokens: int) -> Iterator[None]:
        """While this is open every forward rotates as in a prompt of so many tokens, however few it computes."""
        kinds = [module.rope_type for module in self._rotary]
        for module in self._rotary:
            _make(module, tokens)
            module.rope_type = _same_kinds(module.rope_type, "default")
        try:
            yield
        finally:
            for module, kind in zip(self._rotary, kinds, strict=True):
                module.rope_type = kind


def _outside_the_language_model(name: str) -> bool:
    return "language_model" not in name and "lm_head" not in name


def _make(module: Any, tokens: int) -> None:
    """Has a rotary module make its tables for a prompt of so many tokens."""
    device = next(module.buffers()).device
    last = torch.tensor([[tokens - 1]], device=device)
    kinds = module.rope_type
    for extra in [(kind,) for kind in kinds] if isinstance(kinds, dict) else [()]:
        with torch.no_grad():
            module(torch.zeros(1, 1, 1, device=device), last, *extra)


def _table(module: Any, tokens: int) -> str:
    """A digest of the tables that a rotary module would make, which it does not make here."""
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    _make(twin, tokens)
    tables = {name: value.tolist() for name, value in twin._buffers.items()}
    return digest_of(json.dumps(tables), str(twin.attention_scaling) if hasattr(twin, "attention_scaling") else "")


def _same_kinds(kinds: Any, kind: str) -> Any:
    return dict.fromkeys(kinds, kind) if isinstance(kinds, dict) else kind

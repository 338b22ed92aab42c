"""Keeps a model's epoch true: a whole fingerprint at first, a cheap check before each use, a new one when that notices."""

from typing import Any

import torch

from dejakv.engines.transformers.fingerprint import epoch_parts, processor_digest, tokenizer_digest
from dejakv.engines.transformers.structure import Structure
from dejakv.engines.transformers.weights import Weights, unreadable
from dejakv.identity import epoch_of


class ModelWatch:
    """One model, its tokenizer and its processor. Used under the engine's lock.

    epoch          fingerprint of all that makes the same tokens give another state; empty where it cannot be told
    encoder_epoch  the same for a picture's features: whatever is not the language model
    reason         why it cannot be told
    """

    def __init__(self, model: Any, tokenizer: Any, processor: Any, attention: str) -> None:
        self._model, self._tokenizer, self._processor, self._attention = model, tokenizer, processor, attention
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
        structure = self._structure = Structure(self._model, self._processor)
        self._numerics = self._process()
        self.reason = self._why(structure)
        if self.reason:
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
        return "autocast is on" if torch.is_autocast_enabled(self._model.device.type) else ""

    def _why(self, structure: Structure) -> str:
        return self.momentary() or structure.foreign or unreadable(structure.names, structure.tensors())

    def _process(self) -> tuple[str, ...]:
        """What of the process decides how the model computes."""
        device = self._model.device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        backends: Any = torch.backends
        products = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        products += (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
        precisions = [str(part.fp32_precision).replace("none", "ieee") for part in products]  # unset is full precision
        return device, autocast, *precisions


def _outside_the_language_model(name: str) -> bool:
    return "language_model" not in name and "lm_head" not in name

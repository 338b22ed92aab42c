"""Keeps a model's epoch true: a whole fingerprint at first, a cheap check before each use, a new one when that notices.

Everything that makes the same tokens give another state must change the epoch: the model's kind, modules, attributes and code
(`Contents`), its weights (`weights`), tokenizer, processor and rotary tables.
"""

import copy
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from dejakv.engines.transformers.contents import IGNORED, Contents, by_length, changes_with_length, left_by_runs, plain
from dejakv.engines.transformers.kv import piece_of
from dejakv.engines.transformers.model_settings import setting, text_config
from dejakv.engines.transformers.weights import WeightDigest, unreadable
from dejakv.identity import digest_of, epoch_of
from dejakv.pictures import DECODING

_log = logging.getLogger(__name__)

LAYOUT = 4
"""Raised with each change of the stored state, or of its fingerprint."""


_SWITCHES = (
    "blas_preferred_backend", "cpu_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "cublas_allow_fp16_reduced_precision_reduction", "cudnn_benchmark", "cudnn_depthwise_kernel",
    "cudnn_deterministic", "cudnn_enabled", "cudnn_sdp_enabled", "deterministic_algorithms", "fa3_sdp_enabled", "flash_sdp_enabled",
    "linalg_preferred_backend", "math_sdp_allow_fp16_bf16_reduction", "math_sdp_enabled", "mem_efficient_sdp_enabled",
    "miopen_immediate", "mkldnn_deterministic", "mkldnn_enabled", "nnpack_enabled", "overrideable_sdp_enabled", "qengine",
    "rocm_fa_preferred_backend", "sdp_priority_order", "sm_carveout_experimental",
)  # fmt: skip
"""torch's switches between kernels, but for float32 products, which are read with their dtypes."""
_KERNELS = [getter for name in _SWITCHES if (getter := getattr(torch._C, f"_get_{name}", None)) is not None]
_KERNELS += [torch.backends.mha.get_fastpath_enabled, torch.backends.opt_einsum._get_enabled]


def tokenizer_digest(tokenizer: Any) -> str:
    """Vocabulary, special tokens, splitting rules and chat template."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = tokenizer.chat_template
    return digest_of(rules, str(tokenizer.special_tokens_map), json.dumps(template, sort_keys=True, default=str))


class ModelWatch:
    """One model, its tokenizer and its processor. Used under the engine's lock.

    epoch          fingerprint of all that makes the same tokens give another state; empty where it cannot be told
    encoder_epoch  the same for a picture's features: whatever is not the language model
    reason         why it cannot be told
    piece          see `Prepared`
    tables         rotary tables by length
    by_length      whether there are any
    modules        identities of the model's modules
    """

    def __init__(self, model: Any, tokenizer: Any, processor: Any) -> None:
        self._model, self._tokenizer, self._processor = model, tokenizer, processor
        self._told: set[str] = set()
        self.renew()

    def check(self, *, turn: bool = True) -> bool:
        """Compares the model with what its epoch stands for, and makes a new epoch if something changed (False then).

        turn  compare the next part of all weights too, besides every tensor's sample
        """
        contents, weights = self._contents, self._weights
        same = self._numerics == self._process() and contents.unchanged()
        if weights is None:
            same = same and self.reason == self._why()
        elif not weights.unchanged(contents.names, contents.tensors(), turn=turn):
            # `_renew` must not keep a digest whose cheap check still agrees.
            same, self._weights = False, None

        if not same:
            self._renew()
        return same

    @contextmanager
    def running(self) -> Iterator["Writes"]:
        """While it is open, a run computes state, and every attribute that anyone sets on a module of the model is noted."""
        with _writes(Writes(self)) as writes:
            yield writes

    def same(self) -> bool:
        """Whether the model is what its epoch stands for, as far as a look without a turn sees. Makes no new epoch."""
        contents, weights = self._contents, self._weights
        if weights is None or self._numerics != self._process() or not contents.unchanged():
            return False
        return weights.unchanged(contents.names, contents.tensors(), turn=False)

    def renew(self) -> str:
        """Fingerprints everything anew and returns the epoch."""
        self._weights: WeightDigest | None = None
        self._tokenizer_digest = tokenizer_digest(self._tokenizer)
        self._renew()
        return self.epoch

    def _renew(self) -> None:
        contents = self._contents = Contents(self._model, self._processor)
        self.tables, self.piece = RotaryTables(self._model), piece_of(self._model)
        self.modules = frozenset(map(id, self._model.modules()))
        self.by_length = self.tables.any
        self._numerics = self._process()
        self.reason = self._why()

        self.epoch = self.encoder_epoch = ""
        if self.reason:
            # One warning for each reason: the model is checked before every request.
            if self.reason not in self._told:
                self._told.add(self.reason)
                _log.warning("nothing is reused: %s", self.reason)
            self._weights = None
            return

        names, tensors = contents.names, contents.tensors()
        # Other contents may have changed alone: the digest of all weights takes longest.
        if self._weights is None or not self._weights.unchanged(names, tensors, turn=False):
            self._weights = WeightDigest(names, tensors)

        parts = {"layout": LAYOUT, "transformers": transformers.__version__, "piece": self.piece}
        parts |= {"contents": contents.digest, "numerics": self._numerics}
        if self._processor is not None:
            parts["pictures"] = DECODING
        self.epoch = epoch_of({**parts, "weights": self._weights.digest, "tokenizer": self._tokenizer_digest})
        self.encoder_epoch = epoch_of({**parts, "weights": self._weights.digest_where(_outside_the_language_model)})

    def momentary(self) -> str:
        """Why nothing can be reused or stored at this moment, whatever the model is; empty if nothing speaks against it."""
        if self._model.training:
            return "the model is in training mode: call model.eval()"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast is on"
        # A device context only decides where tensors are made.
        modes = [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
        if modes or torch._C._len_torch_dispatch_stack():
            return "a torch function mode or dispatch mode is on"
        return ""

    def _why(self) -> str:
        contents = self._contents
        foreign = self.momentary() or contents.foreign or self.tables.unknown()
        return foreign or unreadable(contents.names, contents.tensors())

    def _process(self) -> tuple[str, ...]:
        """Settings of the process that decide how the model computes."""
        backends: Any = torch.backends
        products = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        products += (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
        precisions = [str(part.fp32_precision).replace("none", "ieee") for part in products]  # unset is full precision
        kernels = [str(getter()) for getter in _KERNELS]
        return self._model.device.type, self.momentary(), *precisions, *kernels, str(torch.get_default_dtype())


def _outside_the_language_model(name: str) -> bool:
    return "language_model" not in name and "lm_head" not in name


class Writes:
    """What was written on modules during a run, by its callbacks or by another thread, also if it was written back since.

    any  whether an attribute got another value
    """

    def __init__(self, watch: ModelWatch) -> None:
        self._watch, self.any = watch, False

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        if id(module) in self._watch.modules and not self.any and name not in IGNORED:
            before = getattr(module, name, None)
            if before is value or (plain(before) and plain(value) and repr(before) == repr(value)):
                return
            leave = left_by_runs(module)
            self.any = leave is None or not leave(name)


_open_writes: list[Writes] = []
_guard = threading.Lock()
_own_setattr, _own_delattr = nn.Module.__setattr__, nn.Module.__delattr__


def _noting_setattr(self: nn.Module, name: str, value: Any) -> None:
    for writes in _open_writes:
        writes.note(self, name, value)
    _own_setattr(self, name, value)


def _noting_delattr(self: nn.Module, name: str) -> None:
    for writes in _open_writes:
        # A value that no attribute has: a deletion always counts.
        writes.note(self, name, Writes)
    _own_delattr(self, name)


@contextmanager
def _writes(writes: Writes) -> Iterator[Writes]:
    """Passes attributes set on modules by `writes`; `nn.Module` has its own methods again when no run is open."""
    global _own_setattr, _own_delattr
    kind: Any = nn.Module
    with _guard:
        if not _open_writes:
            # Read anew: another library may have replaced the methods meanwhile.
            _own_setattr, _own_delattr = kind.__setattr__, kind.__delattr__
            kind.__setattr__, kind.__delattr__ = _noting_setattr, _noting_delattr
        _open_writes.append(writes)

    try:
        yield writes
    finally:
        with _guard:
            _open_writes.remove(writes)
            if not _open_writes:
                kind.__setattr__, kind.__delattr__ = _own_setattr, _own_delattr


class RotaryTables:
    """Rotary modules that make their tables anew for the length of each prompt (longrope, dynamic NTK): state is for prompts with the same
    tables alone.

    any  whether the model has such modules
    """

    def __init__(self, model: Any) -> None:
        self._config = text_config(model)
        self._modules: list[Any] = [module for module in model.modules() if changes_with_length(module)]
        self.any = bool(self._modules)

    def unknown(self) -> str:
        """Why it cannot be told how positions are rotated: by the length of the prompt, in code of the model's own."""
        for name in ("rope_parameters", "rope_scaling"):
            try:
                rope_settings = getattr(self._config, name, None) or {}
            except Exception as error:  # the configuration's own code
                return f"its {name} cannot be read: {type(error).__name__}: {error}"
            for settings in [rope_settings, *rope_settings.values()]:
                kind = (
                    str(settings.get("rope_type") or settings.get("type") or "") if isinstance(settings, dict) else ""
                )
                if by_length(kind) and not self._modules:
                    return f"its rotary tables depend on the prompt's length ({kind}), and it makes them in its own way"
        return ""

    def epoch_of(self, epoch: str, tokens: int) -> str:
        """The epoch of a prompt of so many tokens: with the tables that the model would make for it now."""
        if not self._modules or not epoch:
            return epoch
        return epoch_of({"model": epoch, "tables": [_table_of(module, tokens) for module in self._modules]})

    def continues(self, cached_tokens: int, tokens: int) -> bool:
        """Whether the model continues a prompt of `tokens` tokens from `cached_tokens` of them. Phi-3 computes a whole prompt anew once it passes
        the limit of its short table."""
        limit = setting(self._config, "original_max_position_embeddings") if self._modules else None
        return not limit or not cached_tokens <= limit < tokens

    @contextmanager
    def of(self, tokens: int) -> Iterator[None]:
        """While this is open every forward rotates as in a prompt of so many tokens, however few it computes."""
        kinds = [module.rope_type for module in self._modules]
        for module, kind in zip(self._modules, kinds, strict=True):
            _make(module, tokens)
            # Kind `default` makes no tables anew; written past `__setattr__`, it is not noted.
            vars(module)["rope_type"] = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"

        try:
            yield
        finally:
            for module, kind in zip(self._modules, kinds, strict=True):
                vars(module)["rope_type"] = kind


def _make(module: Any, tokens: int) -> None:
    """Has a rotary module make its tables for a prompt of so many tokens."""
    device = next(module.buffers()).device
    last = torch.tensor([[tokens - 1]], device=device)
    kinds = module.rope_type
    for extra in [(kind,) for kind in kinds] if isinstance(kinds, dict) else [()]:
        with torch.no_grad():
            module(torch.zeros(1, 1, 1, device=device), last, *extra)


def _table_of(module: Any, tokens: int) -> str:
    """A digest of the tables that a rotary module would make, which it does not make here, and of all that it makes them from."""
    # With a dictionary of its own: the model's buffers stay as they are.
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    _make(twin, tokens)
    tables = {name: value.tolist() for name, value in twin._buffers.items()}
    return digest_of(json.dumps(tables), str(twin.attention_scaling) if hasattr(twin, "attention_scaling") else "")

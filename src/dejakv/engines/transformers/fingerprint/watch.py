"""The watch that keeps a model's epoch true.

It makes a whole fingerprint at first, a cheap check before each use, and a new fingerprint when
that notices a change. Everything that makes the same tokens give another state must change the
epoch: the model's kind, modules, attributes and code (`Contents`), its weights (`weights`),
tokenizer, processor and rotary tables.
"""

import copy
import json
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from dejakv.engines.transformers.fingerprint.content_watch import IGNORED, is_plain_value
from dejakv.engines.transformers.fingerprint.contents import (
    Contents,
    changes_with_length,
    depends_on_length,
    left_by_runs,
)
from dejakv.engines.transformers.fingerprint.weights import WeightDigest, unreadable
from dejakv.engines.transformers.kv import prefill_unit_of
from dejakv.engines.transformers.model_settings import setting, text_config
from dejakv.identity import digest_of, epoch_of
from dejakv.pictures import DECODING

_log = logging.getLogger(__name__)

LAYOUT = 4
"""Raised with each change of the stored state, or of its fingerprint."""


_SWITCHES = (
    "blas_preferred_backend", "cpu_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction", "cudnn_benchmark", "cudnn_depthwise_kernel",
    "cudnn_deterministic", "cudnn_enabled", "cudnn_sdp_enabled", "deterministic_algorithms",
    "fa3_sdp_enabled", "flash_sdp_enabled", "linalg_preferred_backend",
    "math_sdp_allow_fp16_bf16_reduction", "math_sdp_enabled", "mem_efficient_sdp_enabled",
    "miopen_immediate", "mkldnn_deterministic", "mkldnn_enabled", "nnpack_enabled",
    "overrideable_sdp_enabled", "qengine", "rocm_fa_preferred_backend", "sdp_priority_order",
    "sm_carveout_experimental",
)  # fmt: skip
"""Switches of torch between kernels, but for float32 products, which are read with their dtypes."""
_KERNELS = [
    getter for name in _SWITCHES if (getter := getattr(torch._C, f"_get_{name}", None)) is not None
]
_KERNELS += [torch.backends.mha.get_fastpath_enabled, torch.backends.opt_einsum._get_enabled]


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the digest of vocabulary, special tokens, splitting rules and chat template."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    template = tokenizer.chat_template
    return digest_of(
        rules, str(tokenizer.special_tokens_map), json.dumps(template, sort_keys=True, default=str)
    )


class ModelWatch:
    """Watches one model, its tokenizer and its processor. Used under the engine's lock.

    Attributes
    ----------
    epoch : str
        Fingerprint of all that makes the same tokens give another state; empty where it cannot be
        told.
    encoder_epoch : str
        The same for a picture's features: whatever is not the language model.
    reason : str
        Why it cannot be told.
    prefill_unit : int
        Tokens of a prefill unit; see `Prepared`.
    tables : RotaryTables
        Rotary tables by length.
    by_length : bool
        Whether there are any.
    modules : frozenset[int]
        Identities of the model's modules.
    """

    def __init__(self, model: Any, tokenizer: Any, processor: Any) -> None:
        self._model, self._tokenizer, self._processor = model, tokenizer, processor
        self._reported_reasons: set[str] = set()
        self.renew()
        _watches.add(self)
        weakref.finalize(self, _restore_module)

    def check(self, *, turn: bool = True) -> bool:
        """Compare the model with what its epoch stands for; make a new epoch if something changed.

        Parameters
        ----------
        turn : bool
            Whether to compare the next part of all weights too, besides every tensor's sample.

        Returns
        -------
        bool
            False if something changed.
        """
        watched, weights = self._contents.watched, self._weights
        same = self._numerics == self._process() and watched.unchanged()
        if weights is None:
            same = same and self.reason == self._unidentified_reason()
        elif not weights.unchanged(watched.names, watched.tensors(), turn=turn):
            # `_renew` must not keep a digest whose cheap check still agrees.
            same, self._weights = False, None

        if not same:
            self._renew()
        return same

    @contextmanager
    def running(self) -> Iterator["Writes"]:
        """Note what anyone sets on a module of the model, while a run computes state."""
        with _writes(Writes(self)) as writes:
            yield writes

    def is_unchanged(self) -> bool:
        """Tell whether the model is what its epoch stands for, by a check without a turn.

        It makes no new epoch.
        """
        watched, weights = self._contents.watched, self._weights
        if weights is None or self._numerics != self._process() or not watched.unchanged():
            return False
        return weights.unchanged(watched.names, watched.tensors(), turn=False)

    def renew(self) -> str:
        """Fingerprint everything anew and return the epoch."""
        self._weights: WeightDigest | None = None
        self._tokenizer_digest = tokenizer_digest(self._tokenizer)
        self._renew()
        return self.epoch

    def _renew(self) -> None:
        """Fingerprint what may have changed."""
        contents = self._contents = Contents(self._model, self._processor)
        self.tables, self.prefill_unit = RotaryTables(self._model), prefill_unit_of(self._model)
        self.modules = frozenset(map(id, self._model.modules()))
        self.by_length = self.tables.has_modules
        self._numerics = self._process()
        self.reason = self._unidentified_reason()

        self.epoch = self.encoder_epoch = ""
        if self.reason:
            # One warning for each reason: the model is checked before every request.
            if self.reason not in self._reported_reasons:
                self._reported_reasons.add(self.reason)
                _log.warning("nothing is reused: %s", self.reason)

            self._weights = None
            return

        names, tensors = contents.watched.names, contents.watched.tensors()
        # Other contents may have changed alone: the digest of all weights takes longest.
        if self._weights is None or not self._weights.unchanged(names, tensors, turn=False):
            self._weights = WeightDigest(names, tensors)

        parts = {
            "layout": LAYOUT,
            "transformers": transformers.__version__,
            "piece": self.prefill_unit,
        }
        parts |= {"contents": contents.digest, "numerics": self._numerics}
        if self._processor is not None:
            parts["pictures"] = DECODING
        self.epoch = epoch_of(
            {**parts, "weights": self._weights.digest, "tokenizer": self._tokenizer_digest}
        )
        self.encoder_epoch = epoch_of(
            {**parts, "weights": self._weights.digest_where(_outside_the_language_model)}
        )

    def momentary_reason(self) -> str:
        """Return why nothing can be reused or stored at this moment.

        The reason is empty if nothing is against it.
        """
        if self._model.training:
            return "the model is in training mode: call model.eval()"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast is on"
        # A device context only decides where tensors are made.
        modes = [
            mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext
        ]
        if modes or torch._C._len_torch_dispatch_stack():
            return "a torch function mode or dispatch mode is on"
        return ""

    def _unidentified_reason(self) -> str:
        contents = self._contents
        foreign = self.momentary_reason() or contents.foreign or self.tables.unsupported_reason()
        return foreign or unreadable(contents.watched.names, contents.watched.tensors())

    def _process(self) -> tuple[str, ...]:
        """Return the settings of the process that decide how the model computes."""
        backends: Any = torch.backends
        products = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        products += (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
        # Unset is full precision.
        precisions = [str(part.fp32_precision).replace("none", "ieee") for part in products]
        kernels = [str(getter()) for getter in _KERNELS]
        return (
            self._model.device.type,
            self.momentary_reason(),
            *precisions,
            *kernels,
            str(torch.get_default_dtype()),
        )


def _outside_the_language_model(name: str) -> bool:
    return "language_model" not in name and "lm_head" not in name


class Writes:
    """Writes on modules during a run, by its callbacks or by another thread, even if undone since.

    Attributes
    ----------
    changed : bool
        Whether an attribute got another value.
    """

    def __init__(self, watch: ModelWatch) -> None:
        self._watch, self.changed = watch, False

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        """Note that an attribute of a module is set to a value."""
        if id(module) in self._watch.modules and not self.changed and name not in IGNORED:
            before = getattr(module, name, None)
            if before is value or (
                is_plain_value(before) and is_plain_value(value) and repr(before) == repr(value)
            ):
                return

            # What the model's own runs leave there is no change.
            leave = left_by_runs(module)
            self.changed = leave is None or not leave(name)


_open_writes: list[Writes] = []
_watches: "weakref.WeakSet[ModelWatch]" = weakref.WeakSet()
_guard = threading.RLock()  # a watch may be collected within


class _NotedModule:
    """Methods `__setattr__` and `__delattr__` of `nn.Module` while a watch lives.

    They stand around those that stood there, and tell open runs of each call.
    """

    def __init__(self) -> None:
        set_before, del_before = nn.Module.__setattr__, nn.Module.__delattr__

        def noting_setattr(self: nn.Module, name: str, value: Any) -> None:
            for writes in _open_writes:
                writes.note(self, name, value)
            set_before(self, name, value)

        def noting_delattr(self: nn.Module, name: str) -> None:
            for writes in _open_writes:
                # A value that no attribute has: a deletion always counts.
                writes.note(self, name, Writes)
            del_before(self, name)

        self.before = set_before, del_before
        self.noting = noting_setattr, noting_delattr
        self._put(self.noting)

    def stands(self) -> bool:
        """Tell whether these methods still stand in `nn.Module`."""
        return (nn.Module.__setattr__, nn.Module.__delattr__) == self.noting

    def leave(self) -> None:
        """Put the former methods back."""
        # Another library may have put its methods around these since.
        if self.stands():
            self._put(self.before)

    def _put(self, methods: tuple[Any, Any]) -> None:
        kind: Any = nn.Module
        kind.__setattr__, kind.__delattr__ = methods


_noted: _NotedModule | None = None


@contextmanager
def _writes(writes: Writes) -> Iterator[Writes]:
    """Let attributes set on modules pass by `writes`.

    The methods of `nn.Module` stay until the last watch is gone: each change of a class lets Python
    forget where all modules' attributes are, which makes the next forward a tenth slower on a small
    model.
    """
    global _noted
    with _guard:
        if _noted is None or not _noted.stands():
            _noted = _NotedModule()
        _open_writes.append(writes)
    try:
        yield writes
    finally:
        with _guard:
            _open_writes.remove(writes)


def _restore_module() -> None:
    """Give `nn.Module` its methods again, once no watch is alive."""
    global _noted
    with _guard:
        if _noted is not None and not list(_watches):
            _noted.leave()
            _noted = None


class RotaryTables:
    """Rotary modules that make their tables anew for the length of each prompt.

    These are longrope and dynamic NTK. Their state is for prompts with the same tables alone.

    Attributes
    ----------
    has_modules : bool
        Whether the model has such modules.
    """

    def __init__(self, model: Any) -> None:
        self._config = text_config(model)
        self._modules: list[Any] = [
            module for module in model.modules() if changes_with_length(module)
        ]
        self.has_modules = bool(self._modules)

    def unsupported_reason(self) -> str:
        """Return why it cannot be told how positions are rotated; empty if it can.

        It cannot where they depend on the length of the prompt, in code of the model's own.
        """
        for name in ("rope_parameters", "rope_scaling"):
            try:
                rope_settings = getattr(self._config, name, None) or {}
            except Exception as error:  # the configuration's own code
                return f"its {name} cannot be read: {type(error).__name__}: {error}"

            # Some models have settings for each type of layer.
            for settings in [rope_settings, *rope_settings.values()]:
                kind = (
                    str(settings.get("rope_type") or settings.get("type") or "")
                    if isinstance(settings, dict)
                    else ""
                )
                if depends_on_length(kind) and not self._modules:
                    return (
                        f"its rotary tables depend on the prompt's length ({kind}), and it makes "
                        "them in its own way"
                    )
        return ""

    def epoch_of(self, epoch: str, tokens: int) -> str:
        """Return the epoch of a prompt of so many tokens, with the tables for its length."""
        if not self._modules or not epoch:
            return epoch
        return epoch_of(
            {"model": epoch, "tables": [_table_of(module, tokens) for module in self._modules]}
        )

    def continues(self, cached_tokens: int, tokens: int) -> bool:
        """Tell whether the model continues a prompt of `tokens` tokens from its first ones.

        Phi-3 computes a whole prompt anew once it passes the limit of its short table.
        """
        limit = setting(self._config, "original_max_position_embeddings") if self._modules else None
        return not limit or not cached_tokens <= limit < tokens

    @contextmanager
    def for_length(self, tokens: int) -> Iterator[None]:
        """Let every forward rotate as in a prompt of so many tokens, however few it computes."""
        kinds = [module.rope_type for module in self._modules]
        for module, kind in zip(self._modules, kinds, strict=True):
            _make(module, tokens)
            # Kind `default` makes no tables anew; written past `__setattr__`, it is not noted.
            vars(module)["rope_type"] = (
                dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
            )

        try:
            yield
        finally:
            for module, kind in zip(self._modules, kinds, strict=True):
                vars(module)["rope_type"] = kind


def _make(module: Any, tokens: int) -> None:
    """Let a rotary module make its tables for a prompt of so many tokens."""
    device = next(module.buffers()).device
    last = torch.tensor([[tokens - 1]], device=device)
    kinds = module.rope_type
    for extra in [(kind,) for kind in kinds] if isinstance(kinds, dict) else [()]:
        with torch.no_grad():
            module(torch.zeros(1, 1, 1, device=device), last, *extra)


def _table_of(module: Any, tokens: int) -> str:
    """Return a digest of the tables that a rotary module would make, and of their sources.

    The module itself makes nothing here.
    """
    # With a dictionary of its own: the model's buffers stay as they are.
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    _make(twin, tokens)
    tables = {name: value.tolist() for name, value in twin._buffers.items()}
    return digest_of(
        json.dumps(tables),
        str(twin.attention_scaling) if hasattr(twin, "attention_scaling") else "",
    )

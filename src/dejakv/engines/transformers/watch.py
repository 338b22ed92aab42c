"""Keeps a model's epoch true: a whole fingerprint at first, a cheap check before each use, a new one when that notices.

Everything that makes the same tokens give another state must change the epoch: the model's kind, modules, attributes and code
(`Structure`), its weights (`weights`), tokenizer, processor and rotary tables.
"""

import copy
import functools
import json
import logging
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dejakv.engines.transformers.attributes import Described, counts, home, in_library, installed
from dejakv.engines.transformers.kv import piece_of
from dejakv.engines.transformers.weights import WeightDigest, unreadable
from dejakv.identity import digest_of, epoch_of

LAYOUT = 2
"""Counted up when the stored state, or the way that it is fingerprinted, changes."""


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
    if processor is None:
        return ""
    own = {name: value for name, value in vars(processor).items() if isinstance(value, int | float | str | bool)}
    settings = [part.to_dict() for part in _parts_of(processor)]
    return digest_of(json.dumps([settings, own], sort_keys=True, default=str))


def _parts_of(processor: Any) -> list[Any]:
    parts = (getattr(processor, name, None) for name in ("image_processor", "video_processor", "feature_extractor"))
    return [part for part in parts if part is not None]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Structure:
    """A model as it was when this was made. `unchanged` compares with what it is now, fast enough for every request.

    digest   fingerprint of all that is not a weight: code, scalars and containers on modules (a norm's epsilon, an
             adapter's scaling, whether it is merged or off), configurations, shared parameters; equal in every process
    names    one for each tensor of `tensors`
    foreign  why the state of this model cannot be identified; empty if it can

    trusted  modules and packages whose code counts as understood, by name
    """

    def __init__(self, model: nn.Module, processor: Any = None, trusted: frozenset[str] = frozenset()) -> None:
        described = Described(dict(model.named_modules()), trusted)
        first: dict[int, str] = {}
        text: list[Any] = []
        names: list[str] = []
        listed = list(described.modules.items())
        for name, module in listed:  # grows where a module is found that no other has registered
            without = _made_anew if changes_with_length(module) else None
            described.watch(vars(module), without)
            described.watch(module._modules)
            held = [(f"{name}.{key}", tensor) for key, tensor in _tensors_of(module)]
            names += [path for path, _ in held]
            shared = [first.setdefault(id(tensor), path) for path, tensor in held if tensor is not None]
            carried = [described.tensor_kind(tensor, path) for path, tensor in held if tensor is not None]
            text.append([name, described.kind(type(module), name), shared, carried])
            for key, value in sorted(vars(module).items()):
                if counts(key) and not (without and without(key)):
                    text.append([key, described.text(value, f"{name}.{key}")])
                elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                    described.text(value, f"{name}.{key}")
            text.append(
                _hooks(described, [vars(module)[key] for key in _HOOKS], f"a forward hook of {name or 'the model'}")
            )
            listed += list(described.modules.items())[len(listed) :]
        everywhere = nn.modules.module
        found = [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
        text.append(_hooks(described, found, "a forward hook of every module"))
        parts = _parts_of(processor)
        text += [described.kind(type(part), "the processor") for part in parts]
        self._modules = [module for _, module in listed]
        self._classes = [type(module) for module in self._modules]
        text += [described.classes(), *_functions(described, self._classes)]
        self._loose = list(described.tensors.values())
        self.names = (*names, *described.tensors)
        self.foreign = described.foreign
        self.digest = digest_of(json.dumps(text))
        for part in parts:
            described.text(part, "the processor")  # watched here; what of it counts is in `processor_digest`
        if processor is not None:
            described.watch(vars(processor))
        self._watcher = described.watcher()

    def tensors(self) -> list[torch.Tensor | None]:
        """Parameters, buffers (persistent or not) and tensors that are plain attributes, as the modules hold them now.

        A parameter that modules share comes more than once.
        """
        return [tensor for module in self._modules for _, tensor in _tensors_of(module)] + self._loose

    def unchanged(self) -> bool:
        """Whether the model is still what it was, weights aside."""
        return self._classes == [type(module) for module in self._modules] and self._watcher.unchanged()


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from module._parameters.items()
    if not changes_with_length(module):
        yield from module._buffers.items()
    else:
        yield from ((name, tensor) for name, tensor in module._buffers.items() if not _made_anew(name))


def changes_with_length(module: nn.Module) -> bool:
    """Whether a rotary module makes its table anew for the length of each prompt (longrope, dynamic NTK)."""
    kinds = vars(module).get("rope_type", "")
    return any(by_length(str(kind)) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def by_length(kind: str) -> bool:
    """Whether rotary tables of this kind depend on a prompt's length."""
    return "dynamic" in kind or kind in ("longrope", "su")


def _made_anew(name: str) -> bool:
    made = name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling"))
    return made and "original" not in name


def _hooks(described: Described, hooks: list[Any], path: str) -> list[Any]:
    found: list[Any] = []
    for held in hooks:
        described.watch(held)
        found.append([text for hook in held.values() if (text := described.text(hook, path)) != "dejakv"])
    return found


def _functions(described: Described, classes: Iterable[type]) -> Iterator[Any]:
    """The functions that the modules' own files call, and the attention function: one may have been replaced."""
    for name in sorted({kind.__module__ for kind in classes}):
        module = sys.modules.get(name)
        if module is None or not in_library(name) or home(name) in ("torch", "dejakv"):
            continue
        described.watch(vars(module))
        for key, value in sorted(vars(module).items()):
            if isinstance(value, types.FunctionType) and not installed(value):
                yield [name, key, described.text(value, f"{name}.{key}")]
    for held in (ALL_ATTENTION_FUNCTIONS._global_mapping, ALL_ATTENTION_FUNCTIONS._local_mapping):
        described.watch(held)
        yield described.text(held.get("sdpa"), "the attention function sdpa")


_log = logging.getLogger(__name__)


class ModelWatch:
    """One model, its tokenizer and its processor. Used under the engine's lock.

    epoch          fingerprint of all that makes the same tokens give another state; empty where it cannot be told
    encoder_epoch  the same for a picture's features: whatever is not the language model
    reason         why it cannot be told
    piece          see `Prepared`
    by_length      the model rotates the same position otherwise in prompts of another length (longrope, dynamic NTK)

    trusted  modules and packages whose code counts as understood, by name
    """

    def __init__(self, model: Any, tokenizer: Any, processor: Any, attention: str, trusted: Iterable[str] = ()) -> None:
        self._model, self._tokenizer, self._processor, self._attention = model, tokenizer, processor, attention
        self._trusted = frozenset(trusted)
        self._told: set[str] = set()
        self._structure: Structure | None = None
        self._weights: WeightDigest | None = None
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
        self.by_length, self.piece = bool(self._rotary), piece_of(self._model)
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
            self._weights = WeightDigest(names, tensors)
        model = self._model  # its code is that of the transformers release
        parts = {
            "layout": LAYOUT,
            "transformers": transformers.__version__,
            "class": type(model).__name__,
            "dtype": str(model.dtype),
            "piece": self.piece,
            "attention": self._attention,
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

"""Rotary tables that depend on a prompt's length (longrope, dynamic NTK): state is for prompts with the same tables alone."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dejakv.identity import digest_of, epoch_of


def by_length(kind: str) -> bool:
    """Whether rotary tables of this kind depend on a prompt's length."""
    return "dynamic" in kind or kind in ("longrope", "su")


def changes_with_length(module: nn.Module) -> bool:
    """Whether a rotary module makes its table anew for the length of each prompt."""
    kinds = vars(module).get("rope_type", "")
    return any(by_length(str(kind)) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def made_anew(name: str) -> bool:
    """Whether such a module writes the attribute of this name for each prompt."""
    return name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling")) and "original" not in name


class Tables:
    """The rotary modules of a model that make tables by length; false where there are none."""

    def __init__(self, model: Any) -> None:
        self._config = model.config.get_text_config(decoder=True)
        self._modules: list[Any] = [module for module in model.modules() if changes_with_length(module)]

    def __bool__(self) -> bool:
        return bool(self._modules)

    def unknown(self) -> str:
        """Why it cannot be told how positions are rotated: by the length of the prompt, in code of the model's own."""
        for name in ("rope_parameters", "rope_scaling"):
            held = getattr(self._config, name, None) or {}
            for given in [held, *held.values()]:
                kind = str(given.get("rope_type") or given.get("type") or "") if isinstance(given, dict) else ""
                if by_length(kind) and not self._modules:
                    return f"its rotary tables depend on the prompt's length ({kind}), and it makes them in its own way"
        return ""

    def epoch_of(self, epoch: str, tokens: int) -> str:
        """The epoch of a prompt of so many tokens: with the tables that the model would make for it now."""
        if not self._modules or not epoch:
            return epoch
        return epoch_of({"model": epoch, "tables": [_table_of(module, tokens) for module in self._modules]})

    def continues(self, held: int, tokens: int) -> bool:
        """Whether the model continues a prompt of so many tokens from `held` of them. Phi-3 computes all of a prompt anew that
        passes the limit of its short table from state that does not."""
        limit = getattr(self._config, "original_max_position_embeddings", None) if self._modules else None
        return not limit or not held <= limit < tokens

    @contextmanager
    def of(self, tokens: int) -> Iterator[None]:
        """While this is open every forward rotates as in a prompt of so many tokens, however few it computes."""
        kinds = [module.rope_type for module in self._modules]
        for module, kind in zip(self._modules, kinds, strict=True):
            _make(module, tokens)
            module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
        try:
            yield
        finally:
            for module, kind in zip(self._modules, kinds, strict=True):
                module.rope_type = kind


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
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    _make(twin, tokens)
    tables = {name: value.tolist() for name, value in twin._buffers.items()}
    return digest_of(json.dumps(tables), str(twin.attention_scaling) if hasattr(twin, "attention_scaling") else "")

"""Models whose upper layers share a lower layer's KV (Gemma3n, Gemma4): a prompt's tokens skip those layers, exactly.

Layers that share KV compute none, so nothing that a later token sees comes out of them. In a prefill that wants the last
token's logits alone, only its row needs them. vLLM has the same as `--kv-sharing-fast-prefill`.
"""

import inspect
from typing import Any

import torch

from dejakv.errors import ModelError


def shares_kv(model: Any) -> int:
    """How many upper layers of a model take a lower layer's KV; 0 for an ordinary one."""
    return int(getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0) or 0)


class SharedKVPrefill:
    """A context manager: while it is open, `generate` and forwards with `logits_to_keep=1` skip the sharing layers for all
    rows but the last. Forwards that want more logits, hidden states or attentions run as ever.

    skipped  rows times layers that were not computed

    Raises: ModelError for a model without sharing layers
    """

    def __init__(self, model: Any) -> None:
        shared = shares_kv(model)
        if not shared:
            raise ModelError(
                f"{type(model).__name__} has no layers that share KV (num_kv_shared_layers): there is nothing to skip; "
                "a layer-condensed model skips layers with a similar task's KV instead"
            )
        self.model = model
        decoder = model.get_decoder()
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.layers = list(decoder.layers)[layers - shared : layers]
        self._signatures = {layer: inspect.signature(layer.forward) for layer in self.layers}
        self.skipped = 0
        self._last_only = False
        self._hooks: list[Any] = []

    def __enter__(self) -> "SharedKVPrefill":
        self._hooks = [self.model.register_forward_pre_hook(self._before_model, with_kwargs=True)]
        self._hooks += [layer.register_forward_pre_hook(self._before_layer, with_kwargs=True) for layer in self.layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._last_only = [], False

    def _before_model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain = not (
            kwargs.get("output_hidden_states") or kwargs.get("output_attentions") or kwargs.get("labels") is not None
        )
        self._last_only = plain and isinstance(kept := kwargs.get("logits_to_keep"), int) and kept == 1

    def _before_layer(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._last_only:
            return None
        bound = self._signatures[layer].bind(*args, **kwargs)
        given = bound.arguments
        rows = given["position_embeddings"][0].shape[1]
        hidden = given["hidden_states"]
        if rows == 1:
            return None
        self.skipped += rows - 1
        if hidden.shape[-2] > 1:
            given["hidden_states"] = hidden[..., -1:, :]
        given["position_embeddings"] = tuple(part[:, -1:] for part in given["position_embeddings"])
        for name in ("per_layer_input", "attention_mask", "position_ids"):
            if isinstance(value := given.get(name), torch.Tensor):
                given[name] = value[..., -1:] if name == "position_ids" else value[..., -1:, :]
        return bound.args, bound.kwargs

"""Cache of an LCKV model: it has the layers that compute KV, and no others."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicLayer

from dejakv.prototypes.lckv.layout import KVLayout

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class GivenRows:
    """KV of the prompt that a similar task supplies, so that its rows skip the condensed layers.

    Attributes
    ----------
    kv : dict[int, KV]
        For each of `KVLayout.task_layers`, keys (rotated to this prompt's positions) and values
        [batch, heads, n, dim]. Values in rows to compute are not used.
    rows : Tensor, shape [batch, r]
        Indices of the rows that are computed, ascending, without repetition; the last row is among
        them.
    """

    kv: dict[int, KV]
    rows: torch.Tensor

    def widened(self, batch: int) -> "GivenRows":
        """Repeat the rows of one prompt for `batch`: beams, or several samples."""
        if self.rows.shape[0] == batch:
            return self

        def wide(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.expand(batch, *tensor.shape[1:])

        return GivenRows(
            {layer: (wide(k), wide(v)) for layer, (k, v) in self.kv.items()}, wide(self.rows)
        )


class LCKVCache(Cache):
    """Keys and values of `layout.kv_layers`, addressed by the layer's number.

    Each tensor is [batch, heads, tokens, dim].

    Parameters
    ----------
    layout : KVLayout
        The model's layers.
    donor_rows : GivenRows, optional
        Rows of the next prefill that need not be computed; used once.
    settled : bool
        Every prefill into the cache iterates until its KV changes by no more than rounding does,
        whatever the configuration says. Its content is then the KV of token-by-token decoding,
        however the prompt was divided.
    """

    def __init__(
        self, layout: KVLayout, donor_rows: GivenRows | None = None, *, settled: bool = False
    ) -> None:
        layers: list[Any] = [DynamicLayer() for _ in layout.kv_layers]
        super().__init__(layers=layers)
        # The model speaks of its own numbers, and the cache has no room for condensed layers.
        self.slots = {layer: slot for slot, layer in enumerate(layout.kv_layers)}
        self.layout, self.donor_rows, self.settled = layout, donor_rows, settled

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> KV:
        """Add KV to a layer, and return the whole. `layer_idx` is the number in the model."""
        return super().update(key_states, value_states, self.slots[layer_idx], *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens, the same in every layer."""
        return cast(Any, self.layers[0]).get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return length and offset of the keys for a mask, the same in every layer."""
        return cast(Any, self.layers[0]).get_mask_sizes(query_length)


def cached_kv(cache: Cache | None, layer: int) -> KV | None:
    """Return the KV that a cache holds of a layer; None without any.

    Transformers' own caches, addressed by all layers, are read as well.
    """
    if cache is None:
        return None
    slot = cache.slots[layer] if isinstance(cache, LCKVCache) else layer
    layers: list[Any] = list(cache.layers)
    # transformers makes a cache's layers as they are filled.
    if slot >= len(layers) or layers[slot].get_seq_length() == 0:
        return None
    return layers[slot].keys, layers[slot].values


def cached_length(cache: Cache | None, layout: KVLayout) -> int:
    """Return the number of tokens that a cache holds."""
    first = cached_kv(cache, layout.kv_layers[0])
    return 0 if first is None else first[0].shape[-2]

"""Passes of an LCKV forward: bottom layers once, the loop until it has settled, top layers once.

A token's condensed layers need the top layer's KV of all earlier tokens. Token by token this is at
hand. For a whole prompt the KV starts at zero and is computed again from its last estimate
(arXiv 2405.10637, section 3): after t iterations the first t tokens are exact, and others approach
their value far sooner.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from transformers.cache_utils import Cache

from dejakv.prototypes.lckv.attention import LCKVDecoderLayer, RowMasks
from dejakv.prototypes.lckv.cache import KV, GivenRows, cached_kv
from dejakv.prototypes.lckv.layout import KVLayout

Place = tuple[torch.Tensor, torch.Tensor]

ROUNDING = 16
"""Units in the last place of the largest element by which settled KV still changes.

They are 6 for docs-lckv in float32.
"""


@dataclass(frozen=True)
class LoopIterations:
    """Number of iterations of the loop.

    Attributes
    ----------
    without_gradient : int
        Iterations at the beginning.
    with_gradient : int
        Iterations after them.
    until_settled : bool
        Whether the loop stops early at a change that rounding alone can make.
    """

    without_gradient: int
    with_gradient: int
    until_settled: bool = False

    @classmethod
    def to_the_end(cls, tokens: int) -> "LoopIterations":
        """Return the iterations after which nothing changes, for a prompt of so many tokens."""
        return cls(tokens - 1, 1, until_settled=True)

    def for_tokens(self, tokens: int) -> "LoopIterations":
        """Limit the iterations to the number of tokens, after which every token is exact.

        Those with gradient come last and stay.
        """
        # At least one iteration, which computes the hidden states that are returned.
        after = max(1, min(self.with_gradient, tokens))
        return replace(
            self,
            without_gradient=min(self.without_gradient, max(0, tokens - after)),
            with_gradient=after,
        )


@dataclass
class HiddenRows:
    """Hidden states, with what belongs to each row.

    Attributes
    ----------
    hidden : Tensor, shape [batch, rows, hidden]
        Hidden states.
    rotary : tuple[Tensor, Tensor]
        Cosines and sines of the rows' positions.
    masks : RowMasks
        Keys that the rows see.
    index : Tensor, shape [batch, rows], optional
        Index of each row among the new tokens; None: all of them.
    """

    hidden: torch.Tensor
    rotary: Place
    masks: RowMasks
    index: torch.Tensor | None = None

    def pick(self, index: torch.Tensor) -> "HiddenRows":
        """Return the rows of `index` [batch, r] alone."""

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.expand(index.shape[0], -1, -1)
            return tensor.gather(1, index[..., None].expand(-1, -1, tensor.shape[-1]))

        return HiddenRows(
            rows(self.hidden),
            (rows(self.rotary[0]), rows(self.rotary[1])),
            self.masks.pick(index),
            index,
        )


class CondensedPasses:
    """One forward over new tokens behind a cache.

    Attributes
    ----------
    new : dict[int, KV]
        KV of the new tokens by layer, added to the cache at the end.
    trace : dict[int, Tensor]
        Inputs of the layers of the last pass, by layer; for training.
    iterations : int
        Iterations of the loop so far.
    """

    def __init__(
        self, layout: KVLayout, layers: Sequence[LCKVDecoderLayer], cache: Cache | None, tokens: int
    ) -> None:
        self.layout, self.layers, self.cache, self.tokens = layout, layers, cache, tokens
        self.new: dict[int, KV] = {}
        self.trace: dict[int, torch.Tensor] = {}
        self.iterations = 0

    def run_layers(self, rows: HiddenRows, layers: range) -> HiddenRows:
        """Run `layers` in order over the rows. Their KV goes to `new`."""
        hidden = rows.hidden
        for number in layers:
            layer = self.layers[number]
            attention = layer.self_attn
            self.trace[number] = hidden
            normed = layer.input_layernorm(hidden)
            if attention.computes_kv:
                self._note(number, attention.keys_values(normed, rows.rotary), rows.index)

            kv = self._with_past(attention.target)
            seen = rows.masks.view(strict=attention.strict)
            if kv is not None:
                # A single token's condensed layers see earlier tokens alone: it has no key yet.
                seen = seen[..., : kv[0].shape[-2]]
            hidden = hidden + attention(normed, rows.rotary, kv, seen)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))

        return HiddenRows(hidden, rows.rotary, rows.masks, rows.index)

    def settle(
        self, rows: HiddenRows, iterations: LoopIterations, donor_rows: GivenRows | None = None
    ) -> HiddenRows:
        """Run the loop over `rows` until its KV has settled; rows of `donor_rows` keep theirs."""
        if donor_rows is not None:
            self.new.update(donor_rows.kv)
            self._clear(donor_rows)
        elif rows.masks.places.shape[2] == 1:
            # One token sees earlier ones alone: exact at once.
            return self.run_layers(rows, self.layout.loop)
        else:
            self._start(rows)

        iterations = iterations.for_tokens(rows.hidden.shape[1])
        after = rows
        for number in range(iterations.without_gradient + iterations.with_gradient):
            # The tensors are replaced and never written to, so references are enough.
            before = {layer: self.new[layer] for layer in self._targets()}
            blind = number < iterations.without_gradient
            with torch.no_grad() if blind else nullcontext():
                after = self.run_layers(rows, self.layout.loop)
            self.iterations = number + 1
            if (
                iterations.until_settled
                and not torch.is_grad_enabled()
                and self._is_settled(before)
            ):
                break

        return after

    def commit(self) -> None:
        """Add the new tokens' KV to the cache."""
        if self.cache is not None:
            for layer, (keys, values) in self.new.items():
                self.cache.update(keys, values, layer)

    def _targets(self) -> list[int]:
        return [i for i in self.layout.kv_layers if i in self.layout.loop]

    def _start(self, rows: HiddenRows) -> None:
        batch, count = rows.hidden.shape[:2]
        for target in self._targets():
            attention = self.layers[target].self_attn
            shape = (
                batch,
                attention.k_proj.out_features // attention.head_dim,
                count,
                attention.head_dim,
            )
            zero = rows.hidden.new_zeros(shape)
            self.new[target] = (zero, zero)

    def _clear(self, donor_rows: GivenRows) -> None:
        for layer, (keys, values) in donor_rows.kv.items():
            index = donor_rows.rows[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[-1])
            self.new[layer] = (keys.scatter(2, index, 0.0), values.scatter(2, index, 0.0))

    def _note(self, layer: int, kv: KV, index: torch.Tensor | None) -> None:
        # Only the picked rows are new: the others keep what they have.
        if index is not None and layer in self.new:
            row_index = index[:, None, :, None].expand_as(kv[0])
            keys, values = self.new[layer]
            kv = (
                keys.scatter(2, row_index, kv[0].to(keys.dtype)),
                values.scatter(2, row_index, kv[1].to(values.dtype)),
            )

        self.new[layer] = kv

    def _with_past(self, layer: int) -> KV | None:
        past, new = cached_kv(self.cache, layer), self.new.get(layer)
        if past is None or new is None:
            return past or new
        return torch.cat([past[0], new[0]], -2), torch.cat([past[1], new[1]], -2)

    def _is_settled(self, before: dict[int, KV]) -> bool:
        pairs = [(a, b) for i, kv in before.items() for a, b in zip(kv, self.new[i], strict=True)]
        # In float32, since a difference of halves would round.
        change = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
        largest = max(now.abs().max().item() for _, now in pairs)
        return change <= ROUNDING * torch.finfo(pairs[0][1].dtype).eps * largest

"""A cache that starts full of another prompt's state and lets each layer compute only the rows that need it.

The decoder layers run as they are. A forward pre-hook (`blend_hooks`) drops rows from a layer's input; the layer's
attention then calls `cache.update` with the fresh rows' K and V, which land among the donor's, and attends to all.
`generate` sees a cache of length 0 until that is done, so one call does partial prefill, first logits and decode.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from dejakv.errors import InputError
from dejakv.reuse.offsets import Correction, correct, corrections
from dejakv.reuse.rows import RowPlan
from dejakv.reuse.selector import relative_error


class Peeked(Exception):
    """Carries a layer's fresh K and V out of its forward, before attention and MLP have run."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__("peek")
        self.keys, self.values = keys, values


class BlendLayer(DynamicLayer):
    """One layer's K and V, `[batch, kv_heads, tokens, head_dim]`, keys already at this prompt's positions."""

    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.tokens = values.shape[-2]
        self.dtype, self.device, self.is_initialized = values.dtype, values.device, True
        self.pending = True
        self.peeking = False
        self.rows: Tensor | None = None
        self.offsets: list[Correction] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.peeking:
            raise Peeked(key_states, value_states)
        if not self.pending:
            return super().update(key_states, value_states, *args, **kwargs)
        self.pending = False
        if self.rows is None:
            self.keys, self.values = key_states, value_states
        else:
            correct(self.keys, key_states, self.offsets)
            correct(self.values, value_states, self.offsets)
            self.keys.index_copy_(2, self.rows, key_states)
            self.values.index_copy_(2, self.rows, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0 if self.pending else super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length, 0) if self.pending else super().get_mask_sizes(query_length)

    def widen(self, batch: int) -> None:
        """Copies for beams or several samples of one prompt."""
        self.keys = self.keys.expand(batch, -1, -1, -1).contiguous()
        self.values = self.values.expand(batch, -1, -1, -1).contiguous()


@dataclass
class Trace:
    """What was computed. `rows[i]`: the rows of layer i, ascending; None for all of `tokens`."""

    tokens: int
    rows: list[Tensor | None] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        return [self.tokens if rows is None else rows.numel() for rows in self.rows]

    @property
    def mean(self) -> float:
        """Rows, the mean over the layers."""
        return sum(self.counts) / max(1, len(self.rows))

    @property
    def share(self) -> float:
        """Mean share of rows over the layers."""
        return self.mean / max(1, self.tokens)


class BlendCache(Cache):
    """Single use: one prefill of exactly the planned tokens, then ordinary decoding."""

    def __init__(self, layers: list[BlendLayer], plan: RowPlan, look: Any) -> None:
        super().__init__(layers=list(layers))
        self.blends: list[Any] = list(layers)
        self.plan = plan
        self.tokens = layers[0].tokens
        self.trace = Trace(self.tokens)
        self.active: Tensor | None = None
        self._look = look
        self._masks: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._offsets: list[Correction] | None = None

    @property
    def pending(self) -> bool:
        return self.blends[-1].pending

    def enter(self, index: int, layer: Any, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict]:
        """Called before decoder layer `index` while the prefill is pending: the rows it is to compute, and what goes with
        them (tables, position ids, mask). `kwargs` are the model's own, for all tokens."""
        if index == 0:
            self._begin(hidden, kwargs)
        assert self.active is not None
        plan, cache = self.plan, self.blends[index]
        if plan.counts[index] < self.active.numel():
            kept = plan.kept(index, self.active, self._scores(index, layer, hidden, kwargs))
            if kept.numel() < self.active.numel():
                hidden, self.active = hidden.index_select(1, kept), self.active.index_select(0, kept)
                self._masks.clear()
                self._offsets = None
        rows = None if self.active.numel() == self.tokens else self.active
        cache.rows = rows
        if rows is not None and plan.runs is not None and index:  # the first layer's K and V depend on the token alone
            if self._offsets is None:
                self._offsets = corrections(plan.runs, rows, plan.changed)
            cache.offsets = self._offsets
        self.trace.rows.append(rows)
        return hidden, self._for_rows(kwargs, rows, layer)

    def _begin(self, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        if self.trace.rows:
            raise InputError("a blend cache serves one prefill: make a new one for each request")
        if hidden.shape[1] != self.tokens:
            raise InputError(
                f"the cache was planned for {self.tokens} tokens, but {hidden.shape[1]} came: pass the whole prompt, "
                "without chunked prefill"
            )
        if hidden.shape[0] > 1:
            if not bool((hidden == hidden[:1]).all()):
                raise InputError("a batch of different prompts cannot be blended: run them one by one")
            for layer in self.blends:
                layer.widen(hidden.shape[0])
        self.active = torch.arange(self.tokens, device=hidden.device)

    def _scores(self, index: int, layer: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Scores of the active rows."""
        plan, active = self.plan, self.active
        assert active is not None
        known = plan.known_scores(index)
        if known is not None:
            return known[active]
        cache = self.blends[index]
        rows = None if active.numel() == self.tokens else active
        old_values = cache.values if rows is None else cache.values.index_select(2, rows)
        if plan.selector.name == "value":
            values = self._look.values(index, layer, hidden, old_values)
            if values is not None:
                return relative_error(values, old_values)
        keys, values = self._peek(cache, layer, hidden, self._for_rows(kwargs, rows, layer))
        score = relative_error(values, old_values)
        if plan.selector.name == "kv":
            score = score + relative_error(keys, cache.keys if rows is None else cache.keys.index_select(2, rows))
        return score

    def _peek(self, cache: Any, layer: Any, hidden: Tensor, kwargs: dict) -> tuple[Tensor, Tensor]:
        """Runs the layer up to the point where it hands over K and V: its projections, and nothing behind them."""
        cache.peeking = True
        try:
            layer.forward(hidden, **kwargs)
        except Peeked as peek:
            return peek.keys, peek.values
        finally:
            cache.peeking = False
        raise InputError(f"{type(layer).__name__} did not hand its keys to the cache: use the selector 'similarity'")

    def _for_rows(self, kwargs: dict[str, Any], rows: Tensor | None, layer: Any) -> dict[str, Any]:
        """The model's arguments for these rows. Rows that are dropped need an explicit mask: without one, SDPA takes the
        queries for the first positions and cuts K and V short."""
        if rows is None:
            return kwargs
        made = dict(kwargs)
        cos, sin = kwargs["position_embeddings"]
        made["position_embeddings"] = (cos.index_select(-2, rows), sin.index_select(-2, rows))
        if kwargs.get("position_ids") is not None:
            made["position_ids"] = kwargs["position_ids"].index_select(-1, rows)
        made["attention_mask"] = self._mask(kwargs.get("attention_mask"), rows)
        return made

    def _mask(self, mask: Tensor | None, rows: Tensor) -> Tensor:
        # Layers of one kind share a mask object; a model with sliding and full layers alternates between two.
        held = self._masks.get(id(mask))
        if held is not None and held[0] is mask:
            return held[1]
        if mask is None:
            made = (torch.arange(self.tokens, device=rows.device)[None] <= rows[:, None])[None, None]
        elif mask.dim() == 4:
            self._refuse_padding(mask)
            made = mask.index_select(2, rows)
        else:
            raise InputError(
                "blend needs the attention implementation 'sdpa' or 'eager': load the model with one of them"
            )
        self._masks[id(mask)] = (mask, made)
        return made

    def _refuse_padding(self, mask: Tensor) -> None:
        """A token that cannot even see itself is padding, and padding shifts positions that the donor's keys rely on."""
        own = mask.diagonal(dim1=-2, dim2=-1)
        seen = own if own.dtype == torch.bool else own >= 0
        if not bool(seen.all()):
            raise InputError(
                "a prompt with padding cannot be blended: run each prompt of the batch alone, without padding"
            )

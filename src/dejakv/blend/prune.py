"""KV cache pruned layer by layer to the tokens attended to by the prompt's end (SemShareKV, arXiv 2509.24832; SnapKV,
arXiv 2404.14469).

    cache = PrunableDynamicCache.prefill(model, ids, PruneConfig())
    model.generate(ids, past_key_values=cache, attention_mask=torch.ones_like(ids))

Layers keep different numbers of tokens: decoding continues one token at a time, at the true positions.
"""

import math
import weakref
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from dejakv.blend.attention_probe import AttentionProbe
from dejakv.errors import InputError, ModelError
from dejakv.settings import NumberRange, Positive, check_fields

Policy = Literal["attention", "snapkv", "none"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
SomeShare = Annotated[float, NumberRange(0, 1, above=True)]
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models with the hooks of pruned decoding."""


@dataclass(frozen=True)
class PruneConfig:
    """Settings of pruning.

    policy         `attention`: the fewest tokens with `recovery` of the window's attention; `snapkv`: the highest attention,
                   smoothed over 7 neighbours; `none`: everything
    keep_first, keep_last  maximum share of tokens kept in the first and the last layer; between them it decays exponentially
    recovery       share of the attention mass to keep, for policy `attention`
    window         last tokens whose attention counts; they are always kept, and so is the first token (attention sink)
    minimum        least tokens kept in every layer
    """

    policy: Policy = "attention"
    keep_first: SomeShare = 0.9
    keep_last: SomeShare = 0.2
    recovery: SomeShare = 0.95
    window: Positive = 32
    minimum: Positive = 64

    def __post_init__(self) -> None:
        check_fields(self)

    def share(self, layer: int, layers: int) -> float:
        """Maximum share of tokens kept in a layer."""
        decay = math.log(self.keep_first / self.keep_last) / max(1, layers - 1)
        return self.keep_first * math.exp(-decay * layer)


def kept_rows(weights: Tensor, layer: int, layers: int, config: PruneConfig) -> Tensor:
    """Indices of the tokens kept in a layer, ascending. `weights`: `[tokens]`, the window's attention to each."""
    tokens = weights.numel()
    budget = min(tokens, max(config.minimum, round(config.share(layer, layers) * tokens)))
    if config.policy == "none" or budget >= tokens:
        return torch.arange(tokens, device=weights.device)

    scores = weights.float()
    if config.policy == "snapkv":
        scores = torch.nn.functional.avg_pool1d(scores[None, None], 7, stride=1, padding=3, count_include_pad=False)[
            0, 0
        ]

    always = torch.zeros(tokens, dtype=torch.bool, device=weights.device)
    always[0] = True
    always[-min(config.window, tokens) :] = True

    if config.policy == "attention":
        order = scores.argsort(descending=True)
        mass = scores[order].cumsum(0)
        # One more than stay below the mass: with it the mass is reached.
        enough = order[: int((mass < config.recovery * mass[-1]).sum()) + 1]
        needed = int(always.index_fill(0, enough, True).sum())
        budget = max(config.minimum, min(budget, needed))
    # The window is kept even beyond the budget.
    count = max(min(budget, tokens), int(always.sum()))
    return scores.masked_fill(always, math.inf).topk(count).indices.sort().values


class PrunedLayer(DynamicLayer):
    """K and V of the kept tokens. `logical`: number of positions seen, the position of the next token. Raises: InputError for more than one
    token at a time."""

    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor, logical: int) -> None:
        super().__init__()
        self.keys, self.values, self.logical = keys, values, logical
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[-2] != 1:
            raise InputError("a pruned cache decodes one token at a time: prefill the prompt before pruning")
        self.logical += 1
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.logical

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        stored_tokens = self.keys.shape[-2]
        return stored_tokens + query_length, self.logical - stored_tokens

    def crop(self, tokens_to_remove: int) -> None:
        count = abs(tokens_to_remove)
        super().crop(-count)
        self.logical -= count


class PrunableDynamicCache(Cache):
    """Pruned cache. `kept[i]`: indices of the prompt's tokens kept in layer i. `full_bytes`: bytes of all tokens."""

    def __init__(self, layers: list[PrunedLayer], kept: list[Tensor], full_bytes: int) -> None:
        super().__init__(layers=list(layers))
        self.kept = kept
        self.full_bytes = full_bytes

    @property
    def nbytes(self) -> int:
        """Measured bytes of K and V."""
        pruned_layers: list[Any] = list(self.layers)
        return sum(
            part.element_size() * part.nelement() for layer in pruned_layers for part in (layer.keys, layer.values)
        )

    @classmethod
    @torch.inference_mode()
    def prefill(cls, model: Any, ids: Tensor, config: PruneConfig | None = None) -> "PrunableDynamicCache":
        """Compute `ids` `[1, n]` and prune all but the last token; continue with `generate(ids, past_key_values=...)`.

        The last token, which reads the answer, is computed twice: once for its attention, once more from the pruned state like every later
        token. Raises: InputError for a batch or a prompt of one token, ModelError for models with sliding windows.
        """
        if ids.shape[0] != 1 or ids.shape[1] < 2:
            raise InputError(
                f"pruning takes one prompt of at least 2 tokens, not {tuple(ids.shape)}: run prompts one by one"
            )

        config = config or PruneConfig()
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        with AttentionProbe(config.window) as probe:
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

        filled_layers: list[Any] = list(cache.layers)
        for layer in filled_layers:
            layer.crop(-1)
        return cls.of(model, cache, probe.weights, config)

    @classmethod
    def of(cls, model: Any, cache: Cache, weights: list[Tensor], config: PruneConfig) -> "PrunableDynamicCache":
        """Prune a filled cache by the attention weights of each layer (`AttentionProbe.weights`). Raises: ModelError for another number of
        layers."""
        filled_layers: list[Any] = list(cache.layers)
        if len(weights) != len(filled_layers):
            raise ModelError(
                f"{len(weights)} attention calls were seen for {len(filled_layers)} layers: load the model with --attn sdpa or eager"
            )

        check_prunable(model)
        tokens = filled_layers[0].keys.shape[-2]
        layers, row_indices, full = [], [], 0
        for index, (layer, weight) in enumerate(zip(filled_layers, weights, strict=True)):
            # The probe saw the last token too, which the cache has not.
            rows = kept_rows(weight[:tokens], index, len(filled_layers), config)
            full += 2 * layer.keys.element_size() * layer.keys.nelement()
            keys, values = layer.keys.index_select(2, rows), layer.values.index_select(2, rows)
            layers.append(PrunedLayer(keys, values, tokens))
            row_indices.append(rows)

        install_hooks(model)
        return cls(layers, row_indices, full)


def check_prunable(model: Any) -> None:
    """Refuse a model with sliding windows. Raises: ModelError."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if "sliding_attention" in kinds or (not kinds and getattr(text, "sliding_window", None)):
        raise ModelError(
            f"{type(model).__name__} has sliding windows, which pruned layers cannot express: do not prune it"
        )


def install_hooks(model: Any) -> None:
    """Drop the attention mask of every decoder layer while a pruned cache is in use. Idempotent; other caches are not affected.

    Pruned layers differ in length, so no mask fits all. A single new token attends to every kept token and needs none.
    """
    if model in _hooked:
        return

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(kwargs.get("past_key_values"), PrunableDynamicCache) and kwargs.get("attention_mask") is not None:
            return args, {**kwargs, "attention_mask": None}
        return None

    for layer in model.get_decoder().layers:
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    _hooked.add(model)

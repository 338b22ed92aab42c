"""KV cache pruned layer by layer to the tokens that the prompt's end attends to.

The methods are SemShareKV's (arXiv 2509.24832) and SnapKV's (arXiv 2404.14469).

    cache = PrunableDynamicCache.prefill(model, ids, PruneConfig())
    model.generate(ids, past_key_values=cache, attention_mask=torch.ones_like(ids))

Layers keep different numbers of tokens: decoding continues one token at a time, at the true
positions.
"""

import math
import weakref
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from dejakv.blend.attention_probe import AttentionProbe
from dejakv.errors import InputError, ModelError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.settings import NumberRange, Positive, strict_dataclass

Policy = Literal["attention", "snapkv", "none"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
SomeShare = Annotated[float, NumberRange(0, 1, above=True)]
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models with the hooks of pruned decoding."""


@strict_dataclass()
class PruneConfig:
    """Settings of pruning."""

    policy: Policy = "attention"
    """`attention`: the fewest tokens with `recovery` of the window's attention; `snapkv`: the
    highest attention, smoothed over 7 neighbours; `none`: everything"""
    keep_first: SomeShare = 0.9
    """maximum share of tokens kept in the first and the last layer; between them it decays
    exponentially"""
    keep_last: SomeShare = 0.2
    """maximum share of tokens kept in the first and the last layer; between them it decays
    exponentially"""
    recovery: SomeShare = 0.95
    """share of the attention mass to keep, for policy `attention`"""
    window: Positive = 32
    """last tokens whose attention counts; they are always kept, and so is the first token
    (attention sink)"""
    minimum: Positive = 64
    """least tokens kept in every layer"""

    def share(self, layer: int, layers: int) -> float:
        """Return the maximum share of tokens kept in a layer, numbered from 0, of `layers`."""
        decay = math.log(self.keep_first / self.keep_last) / max(1, layers - 1)
        return self.keep_first * math.exp(-decay * layer)


def kept_rows(weights: Tensor, layer: int, layers: int, config: PruneConfig) -> Tensor:
    """Return the indices of the tokens that stay in a layer, ascending.

    Parameters
    ----------
    weights : Tensor, shape [tokens]
        Attention of the window to each token.
    layer : int
        Number of the layer, of `layers`.
    config : PruneConfig
        Settings of pruning.
    """
    tokens = weights.numel()
    budget = min(tokens, max(config.minimum, round(config.share(layer, layers) * tokens)))
    if config.policy == "none" or budget >= tokens:
        return torch.arange(tokens, device=weights.device)

    scores = weights.float()
    if config.policy == "snapkv":
        scores = torch.nn.functional.avg_pool1d(
            scores[None, None], 7, stride=1, padding=3, count_include_pad=False
        )[0, 0]

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
    """K and V of the tokens that stay in one layer.

    Parameters
    ----------
    keys, values : Tensor
        State of these tokens.
    logical : int
        Number of positions seen, which is the position of the next token.
    """

    keys: Any
    values: Any

    def __init__(self, keys: Tensor, values: Tensor, logical: int) -> None:
        super().__init__()
        self.keys, self.values, self.logical = keys, values, logical
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the state of one token.

        Raises
        ------
        InputError
            For more than one token at a time.
        """
        if key_states.shape[-2] != 1:
            raise InputError(
                "a pruned cache decodes one token at a time: prefill the prompt before pruning"
            )
        self.logical += 1
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Return the number of positions seen, so that the next token gets its true position."""
        return self.logical

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the mask and its offset: stored tokens and positions differ."""
        # Masks count positions, of which the layer has dropped some.
        stored_tokens = self.keys.shape[-2]
        return stored_tokens + query_length, self.logical - stored_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `abs(tokens_to_remove)` tokens."""
        count = abs(tokens_to_remove)
        super().crop(-count)
        self.logical -= count


class PrunableDynamicCache(Cache):
    """Cache of transformers whose layers have only the tokens that pruning left.

    Parameters
    ----------
    layers : list[PrunedLayer]
        State of the tokens that stay, by layer.
    kept : list[Tensor]
        For each layer the indices of the prompt's tokens that stay.
    full_bytes : int
        Bytes of K and V of all tokens, before pruning.
    """

    def __init__(self, layers: list[PrunedLayer], kept: list[Tensor], full_bytes: int) -> None:
        super().__init__(layers=list(layers))
        self.kept = kept
        self.full_bytes = full_bytes

    @property
    def nbytes(self) -> int:
        """Measured bytes of K and V."""
        # Measured, since layers keep different numbers of tokens.
        pruned_layers: list[Any] = list(self.layers)
        return sum(
            part.element_size() * part.nelement()
            for layer in pruned_layers
            for part in (layer.keys, layer.values)
        )

    @classmethod
    @torch.inference_mode()
    def prefill(
        cls, model: Any, ids: Tensor, config: PruneConfig | None = None
    ) -> "PrunableDynamicCache":
        """Compute a prompt and prune all but its last token.

        The caller continues with `generate(ids, past_key_values=...)`. The last token, which reads
        the answer, is computed twice: once for its attention, and once more from the pruned state
        like every later token.

        Parameters
        ----------
        model : PreTrainedModel
            Model of transformers.
        ids : Tensor, shape [1, n]
            Tokens of the prompt, at least 2.
        config : PruneConfig, optional
            Settings of pruning.

        Raises
        ------
        InputError
            For a batch or a prompt of one token.
        ModelError
            For a model with sliding windows, or whose attention cannot be observed.
        """
        if ids.shape[0] != 1 or ids.shape[1] < 2:
            raise InputError(
                "pruning takes one prompt of at least 2 tokens, not "
                f"{tuple(ids.shape)}: run prompts one by one"
            )

        config = config or PruneConfig()
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        with AttentionProbe(config.window) as probe:
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})

        filled_layers: list[Any] = list(cache.layers)
        # The last token is computed again, from the pruned state.
        for layer in filled_layers:
            layer.crop(-1)

        return cls.of(model, cache, probe.weights, config)

    @classmethod
    def of(
        cls, model: Any, cache: Cache, weights: list[Tensor], config: PruneConfig
    ) -> "PrunableDynamicCache":
        """Prune a filled cache, and install the hooks of pruned decoding in the model.

        Parameters
        ----------
        model : PreTrainedModel
            Model that filled the cache.
        cache : Cache
            Cache with K and V of all tokens.
        weights : list[Tensor]
            Attention weights of each layer (`AttentionProbe.weights`).
        config : PruneConfig
            Settings of pruning.

        Raises
        ------
        ModelError
            For weights of another number of layers, and for models with sliding windows.
        """
        filled_layers: list[Any] = list(cache.layers)
        if len(weights) != len(filled_layers):
            raise ModelError(
                f"{len(weights)} attention calls were seen for "
                f"{len(filled_layers)} layers: load the model with --attn sdpa or "
                "eager"
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
    """Refuse a model with sliding windows.

    Raises
    ------
    ModelError
        If a layer has a sliding window.
    """
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if "sliding_attention" in kinds or (not kinds and getattr(text, "sliding_window", None)):
        raise ModelError(
            f"{type(model).__name__} has sliding windows, which pruned layers "
            "cannot express: do not prune it"
        )


def install_hooks(model: Any) -> None:
    """Drop the attention mask of every decoder layer while a pruned cache is in use.

    Pruned layers differ in length, so no mask fits all. A single new token attends to every stored
    token and needs none. Other caches are not affected. A model gets its hooks once.
    """
    if model in _hooked:
        return

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            isinstance(kwargs.get(CACHE_NAME), PrunableDynamicCache)
            and kwargs.get("attention_mask") is not None
        ):
            return args, {**kwargs, "attention_mask": None}
        return None

    for layer in model.get_decoder().layers:
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    _hooked.add(model)

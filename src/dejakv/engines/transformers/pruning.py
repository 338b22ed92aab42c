"""Decoding from a pruned copy of a prompt's state, as SemShareKV does (arXiv 2509.24832). The whole state stays for the store."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

from dejakv.config.reuse import PrunePolicy
from dejakv.engines.transformers.continuation import copied
from dejakv.errors import ModelError
from dejakv.models.lckv.layout import layout_of
from dejakv.request import Request
from dejakv.reuse.attention_probe import AttentionProbe
from dejakv.reuse.prune import PrunableDynamicCache, PruneConfig, check_prunable, install_hooks


def pruning_of(policy: PrunePolicy, model: Any) -> PruneConfig | None:
    """The settings of a policy, None for `none`. Raises: ModelError for a model whose layers cannot be pruned."""
    if policy == "none":
        return None
    if layout_of(model) is not None:
        raise ModelError(
            f"the layers of {type(model).__name__} share one layer's KV, which is pruned for none of them alone: leave out --prune"
        )
    check_prunable(model)
    install_hooks(model)  # before the model is watched for changes
    return PruneConfig(policy=policy)


def may_prune(request: Request) -> bool:
    """A request that asks for exact reuse, or none, is decoded from its whole state."""
    return request.reuse not in ("off", "exact")


@torch.inference_mode()
def prefill_pruned(
    model: Any,
    ids: torch.Tensor,
    cache: Cache,
    held: int,
    positions: torch.Tensor | None,
    features: Mapping[str, Any],
    config: PruneConfig,
) -> PrunableDynamicCache:
    """Computes `ids` `[1, n]` into a cache that holds the first `held`, and returns a pruned copy of all but the last token.

    The last token is computed twice: here, to see what it attends to, and again from the pruned state.
    """
    n = ids.shape[1]
    place = positions if positions is not None else torch.arange(n, device=ids.device)[None]
    with AttentionProbe(config.window) as probe:
        model(
            input_ids=ids[:, held:],
            past_key_values=cache,
            position_ids=place[..., held:],
            use_cache=True,
            return_dict=True,
            logits_to_keep=1,
            **features,
        )
    before = copied(cache, n - 1)
    if before is None:
        raise ModelError(f"the state of {type(model).__name__} has no plain rows to prune: leave out --prune")
    return PrunableDynamicCache.of(model, before, probe.weights, config)

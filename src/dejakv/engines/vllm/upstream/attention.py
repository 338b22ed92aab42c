# pyright: reportMissingImports=false
"""vLLM's attention layers: hooks, and a forward of chosen rows."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def hook_attention(
    layer: Any, update: Callable[..., None], attend: Callable[..., Any]
) -> Generator[None]:
    """Let a layer's attention call these functions in place of its own methods.

    The layer's methods are restored afterwards, whatever happens (`v1/attention/backend.py`).

    Parameters
    ----------
    layer : Attention
        The attention layer.
    update : Callable
        Writes K and V; called as `(method, layer, key, value, cache, slots)`.
    attend : Callable
        Computes attention; called as `(method, layer, query, ...)`.
    """
    impl = layer.impl
    own_update, own_forward = impl.do_kv_cache_update, impl.forward

    impl.do_kv_cache_update = lambda *given: update(own_update, *given)
    impl.forward = lambda *given, **options: attend(own_forward, *given, **options)
    try:
        yield
    finally:
        # The instance's attributes hid the class's methods, which are seen again.
        del impl.do_kv_cache_update, impl.forward


def attention_of(layer: Any) -> str:
    """Return the name of a layer's attention implementation."""
    return type(getattr(layer, "impl", layer)).__name__


def is_latent(layer: Any) -> bool:
    """Tell whether a layer caches a latent row for each token (MLA), in place of K and V."""
    return hasattr(getattr(layer, "impl", None), "kv_lora_rank")


def decodes_alone_behind(vllm_config: Any) -> bool:
    """Tell whether nothing but a single token can be computed behind cached ones.

    So it is for MLA on a CPU without AMX, for which vLLM turns chunked prefill and prefix caching
    off (`platforms/cpu.py`).
    """
    from vllm.platforms import current_platform

    scheduler = vllm_config.scheduler_config
    return (
        vllm_config.model_config.use_mla
        and current_platform.is_cpu()
        and not scheduler.enable_chunked_prefill
    )


def no_forward(runner: Any, model: Any, layers: Mapping[str, Any]) -> str:
    """Return why rows cannot be recomputed with this model; empty if they can."""
    for layer in layers.values():
        # Corrected rows must be written between the update and the attention of a layer.
        if layer.attn_backend.forward_includes_kv_cache_update:
            return (
                f"{attention_of(layer)} writes K and V while it attends. Choose another attention "
                "backend, or leave blend out"
                " of mode and modes"
            )

    if getattr(runner, "lookback_token_ids", None) is not None:
        return f"{type(model).__name__} looks at tokens before the rows that it computes"
    return ""


def forward_rows(runner: Any, model: Any, layers: Mapping[str, Any], batch: Any) -> None:
    """Run the model over the rows of a `blend.rows.RowBatch`, not compiled.

    The metadata is made as the model runner makes it (`v1/worker/gpu_model_runner.py`).
    """
    import torch
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    # It needs torch, without which this module can be imported.
    from dejakv.engines.vllm.device import DeviceCopies

    device, config = runner.device, runner.vllm_config.model_config
    upload = DeviceCopies.of(device).upload
    positions, slots = upload(batch.positions), upload(batch.slots)
    common = CommonAttentionMetadata(
        query_start_loc=upload(batch.starts),
        query_start_loc_cpu=batch.starts,
        seq_lens=upload(batch.lengths),
        seq_lens_cpu_upper_bound=batch.lengths,
        num_reqs=len(batch.lengths),
        num_actual_tokens=len(batch.ids),
        max_query_len=int(batch.starts.diff().max()),
        max_seq_len=int(batch.lengths.max()),
        block_table_tensor=upload(batch.blocks),
        slot_mapping=slots,
        causal=True,
        is_prefilling=torch.ones(len(batch.lengths), dtype=torch.bool),
        positions=positions,
    )

    metadata: dict[str, Any] = {}
    # Blends are refused with more than one KV cache group.
    for group in runner.attn_groups[0]:
        metadata.update(dict.fromkeys(group.layer_names, group.build_metadata(common)))

    ids: torch.Tensor | None = upload(batch.ids)
    embeddings: torch.Tensor | None = None
    # Such a model takes embeddings for text as well.
    if config.supports_multimodal_inputs:
        ids, embeddings = None, model.embed_input_ids(ids)
    # Text alone has the same position in all dimensions.
    if config.uses_mrope:
        positions = positions.expand(config.mrope_num_dims, -1)

    context = set_forward_context(
        metadata,
        runner.vllm_config,
        num_tokens=len(batch.ids),
        slot_mapping=dict.fromkeys(layers, slots),
        skip_compiled=True,
    )
    with context:
        model(
            input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=embeddings
        )


def write_rows(
    layer: Any, cache: "torch.Tensor", keys: "torch.Tensor", values: "torch.Tensor", slots: Any
) -> None:
    """Write K (rotated) and V, `[tokens, kv_heads, head_dim]`, to slots of a layer's cache."""
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def scale_and_cap(layer: Any) -> tuple[float, float]:
    """Return the factor of a layer's scores, and their soft cap (0.0 without one)."""
    return layer.impl.scale, getattr(layer.impl, "logits_soft_cap", None) or 0.0


def window_of(layer: Any) -> int | None:
    """Return how many tokens a layer attends to, itself among them; None for all before it."""
    return layer.sliding_window

# pyright: reportMissingImports=false
"""vLLM's KV cache: its groups, blocks, bytes and page layout."""

from typing import Any


def prefix_cache_is_empty(kv_cache_manager: Any) -> bool:
    """Tell whether vLLM's own reset has taken place.

    vLLM resets nothing while blocks are in use (`v1/core/block_pool.py`), beside the null block.
    """
    pool = kv_cache_manager.block_pool
    return pool.num_gpu_blocks - pool.get_num_free_blocks() <= 1 and not len(
        pool.cached_block_hash_to_block
    )


def hash_block_tokens(kv_cache_config: Any) -> int:
    """Return the tokens of one entry of `Request.block_hashes`, at most those of a KV block.

    vLLM 0.31, which blends nothing, does not tell.
    """
    return getattr(kv_cache_config, "hash_block_size", None) or block_tokens(kv_cache_config)


def block_tokens(kv_cache_config: Any) -> int:
    """Return the tokens of one KV block."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def bytes_per_token(kv_cache_config: Any) -> int:
    """Return the bytes of a token's KV in all layers, on one rank; 1 if only states are kept."""
    sizes = zip(kv_cache_config.kv_cache_groups, group_bytes(kv_cache_config), strict=True)
    recurrent = recurrent_groups(kv_cache_config)
    return max(
        1,
        sum(
            size // group.kv_cache_spec.block_size
            for number, (group, size) in enumerate(sizes)
            if number not in recurrent
        ),
    )


def state_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of a recurrent state of all layers, at most, on one rank."""
    sizes = group_bytes(kv_cache_config)
    return sum(sizes[number] for number in recurrent_groups(kv_cache_config))


def group_bytes(kv_cache_config: Any) -> list[int]:
    """Return the bytes of a block of each KV cache group, in all of its layers, on one rank."""
    return [
        # The page of such a specification is of all its layers together.
        group.kv_cache_spec.page_size_bytes
        * (1 if hasattr(group.kv_cache_spec, "kv_cache_specs") else len(group.layer_names))
        for group in kv_cache_config.kv_cache_groups
    ]


def blocks_per_chunk(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the KV blocks of one chunk of vLLM's offloading."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )

    return build_offloading_config(vllm_config, kv_cache_config).cache.blocks_per_chunk


def groups_of(kv_cache_config: Any) -> dict[str, int]:
    """Return the KV cache group of each layer.

    Layers of a group share a request's block table. Layers of different groups share memory.
    """
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {name: number for number, group in groups for name in group.layer_names}


def specs(kv_cache_config: Any) -> list[Any]:
    """Return the cache specification of each layer, or once of layers of a group that are alike."""
    return [
        layer_spec
        for group in kv_cache_config.kv_cache_groups
        for layer_spec in _group_specs(group)
    ]


def _group_specs(group: Any) -> list[Any]:
    return list(getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values())


def recurrent_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the KV cache groups of recurrent layers, whose blocks each hold a state."""
    return tuple(
        number
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        if any(type(spec).__name__ == "MambaSpec" for spec in _group_specs(group))
    )


def keeps_boundary_states(vllm_config: Any) -> bool:
    """Tell whether the state of recurrent layers is kept at ends of blocks."""
    return getattr(vllm_config.cache_config, "mamba_cache_mode", "none") == "align"


def replays_inputs(vllm_config: Any) -> bool:
    """Tell whether recurrent layers keep their latest inputs beside a state."""
    return bool(getattr(vllm_config.cache_config, "use_replayssm", False))


def drops_blocks(kv_cache_config: Any) -> bool:
    """Tell whether a request loses blocks outside of a window while it runs.

    Its table then has 0 in their place (`v1/core/single_type_kv_cache_manager.py`).
    """
    return any(type(spec).__name__ == "SlidingWindowSpec" for spec in specs(kv_cache_config))


def page_layout(kv_cache_config: Any) -> list[str]:
    """Describe the layout of a page's bytes, beside the cache's backend, device and dtype.

    The layout is the order of axes, and for each group its layers and each layer's part of a block
    (`v1/kv_cache_interface.py`). Kernel blocks follow from these, scales from the weights.
    """
    # vLLM 0.31 has one order of axes, and no field for it.
    order = str(getattr(kv_cache_config, "kv_cache_layout", None))
    return [
        order,
        *(
            f"{group.layer_names}:{group.kv_cache_spec}"
            for group in kv_cache_config.kv_cache_groups
        ),
    ]


def attention_layers(vllm_config: Any, names: Any) -> dict[str, Any]:
    """Return the attention modules behind the registered KV caches, in the model's order."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: context[name] for name in names}

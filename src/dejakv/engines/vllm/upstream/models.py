# pyright: reportMissingImports=false
"""The models that a worker of vLLM runs: kernels, drafts, adapters, rotary tables."""

import copy
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dejakv.engines.vllm.upstream.blocks import recurrent_groups
from dejakv.errors import ConfigError

if TYPE_CHECKING:
    pass

log = logging.getLogger("dejakv.vllm")


def device_name() -> str:
    """Return the kind of computing device: `cuda:NVIDIA H200`, or `cpu:cpu:AVX512:False`.

    A CPU's has its instructions (the last is AMX), by which kernels and the order of a page's bytes
    differ (`platforms`, `v1/attention/backends/cpu_attn.py`).
    """
    import torch
    from vllm.platforms import current_platform

    name = f"{current_platform.device_type}:{current_platform.get_device_name()}"
    if not current_platform.is_cpu():
        return name
    return f"{name}:{torch.backends.cpu.get_cpu_capability()}:{torch.cpu._is_amx_tile_supported()}"


def attention_backend(vllm_config: Any) -> str:
    """Return vLLM's attention backend for this model, and its configuration.

    The layers themselves are in the worker, perhaps another process (`v1/attention/selector.py`).
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        # Raised for a model without attention, which may run beside an encoder connector.
        try:
            backend = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                vllm_config.cache_config.cache_dtype,
                use_mla=model.use_mla,
                num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
            )
        except (ValueError, NotImplementedError) as error:
            log.debug("no attention backend: %s", error)
            return ""
    return (
        f"{backend.__module__}.{backend.__qualname__}:{vllm_config.attention_config.compute_hash()}"
    )


def draft_model_config(vllm_config: Any) -> Any | None:
    """Return the configuration of the model that drafts tokens, whose layers the KV cache has too.

    It is None without one, such as for n-grams (`config/speculative.py`).
    """
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    # Methods without a draft model are given the target's configuration.
    return None if draft is vllm_config.model_config else draft


def draft_load_config(vllm_config: Any) -> Any:
    """Return from where the draft model's weights are loaded."""
    return vllm_config.speculative_config.draft_load_config or vllm_config.load_config


def draft_tokens(vllm_config: Any) -> int:
    """Return the maximum tokens that are drafted for a request in a step."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens


def models_of(worker: Any) -> Any:
    """Return the modules that write to the KV cache, of a worker or a model runner.

    They are the served model, and the one that drafts tokens if there is one.
    """
    import torch

    model, get_draft = worker.get_model(), getattr(worker, "get_draft_model", None)
    draft = None if get_draft is None else get_draft()
    return model if draft is None else torch.nn.ModuleList([model, draft])


def recurrent_kernels(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """Return what decides the kernels of recurrent layers; nothing for a model without any."""
    if kv_cache_config is None or not recurrent_groups(kv_cache_config):
        return {}
    mamba = getattr(vllm_config, "mamba_config", None)
    additional = getattr(vllm_config, "additional_config", None)
    return {"recurrent": f"{mamba}:{additional}"}


def arithmetic(vllm_config: Any) -> str:
    """Return the dtype of the model's state: `fp32`, `bf16` or `fp16`; empty for another one."""
    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return names.get(str(vllm_config.model_config.dtype), "")


def is_batch_invariant() -> bool:
    """Tell whether a token's state has the same bits in any batch.

    It has with `VLLM_BATCH_INVARIANT=1` on CUDA. vLLM has this mode for other devices, too
    (`model_executor/determinism`), but there the result is False.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    return bool(envs.VLLM_BATCH_INVARIANT) and current_platform.is_cuda()


def adapters_applied(vllm_config: Any) -> dict[str, object]:
    """Return the settings that decide, beside its files, the effect of a LoRA adapter."""
    lora = vllm_config.lora_config
    names = (
        "lora_dtype",
        "target_modules",
        "enable_moe_shared_loras",
        "enable_mixed_moe_lora_format",
    )
    applied: dict[str, object] = (
        {} if lora is None else {name: str(getattr(lora, name)) for name in names}
    )
    return applied | {"tower": bool(lora and lora.enable_tower_connector_lora)}


def adapters_change_at_runtime() -> bool:
    """Tell whether clients may load other weights behind an adapter's name and id."""
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def is_from_modelscope() -> bool:
    """Tell whether vLLM takes models by name from ModelScope."""
    from vllm import envs

    return bool(envs.VLLM_USE_MODELSCOPE)


def adapters_leak(vllm_config: Any) -> bool:
    """Tell whether a base-model request computes with an adapter when a step has both.

    `lora/ops/torch_ops` takes index -1, no adapter, for the last adapter (vllm-project/vllm#48421).
    The Triton kernels skip such rows. Kernels that were not read count as the former.
    """
    from vllm.platforms import current_platform

    return (
        vllm_config.lora_config is not None
        and not current_platform.get_punica_wrapper().endswith("PunicaWrapperGPU")
    )


def without_adapters(model: Any) -> Any:
    """Return the model with the layers below its LoRA wrappers; itself if it has none.

    A wrapper (`lora/layers`) adds the adapters of vLLM's next step, whose rows are not the blend's.
    Weights and everything unwrapped are shared with the model.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    if isinstance(model, BaseLayerWithLoRA):
        return model.base_layer

    parts = {
        name: without_adapters(part) for name, part in model._modules.items() if part is not None
    }
    if all(part is model._modules[name] for name, part in parts.items()):
        return model

    # Shallow: the served model keeps its wrappers, and no weight is copied.
    bare = copy.copy(model)
    bare._modules = model._modules | parts
    return bare


def tokenizer_of(vllm_config: Any) -> Any:
    """Return the server's tokenizer.

    Raises
    ------
    ConfigError
        The server runs without a tokenizer.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    if vllm_config.model_config.skip_tokenizer_init:
        raise ConfigError(
            "blend looks for the ends of sentences and needs the tokenizer: run without "
            "--skip-tokenizer-init"
        )
    return cached_tokenizer_from_config(vllm_config.model_config)


def rotary_tables(model: Any, layers: Iterable[Any]) -> Iterator[tuple[Any, bool] | None]:
    """Yield each layer's table of cosines and sines for its keys.

    Yields
    ------
    tuple[Tensor, bool] or None
        The table `[positions, 2 * half]`, and whether the partner of a number lies half a head
        apart (else beside it). None without a table.
    """
    # A layer does not know the module around it, which has the rotary embedding.
    holder = {id(child): module for module in model.modules() for child in module.children()}

    for layer in layers:
        rotary = getattr(holder.get(id(layer)), "rotary_emb", None)
        has_table = hasattr(rotary, "cos_sin_cache") and hasattr(rotary, "is_neox_style")
        yield (
            (rotary.cos_sin_cache, rotary.is_neox_style)
            if rotary is not None and has_table
            else None
        )

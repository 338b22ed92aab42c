"""Refusals at the server's start, with reasons, of everything that was not shown to be exact."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.blend.model import CHECKED_ROWS
from dejakv.engines.vllm.ranks import rank_count
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError


@dataclass(frozen=True)
class UnsupportedFeature:
    """An unsupported feature of a server.

    Attributes
    ----------
    feature : str
        Name of the feature, for the error.
    why : str
        Why the feature does not work with DejaKV, for the error.
    is_configured : Callable[[VllmConfig, KVCacheConfig], bool]
        Tells whether a server has the feature.
    blend_only : bool
        Whether it is unsupported only where blends may be asked for.
    beside_offloading : bool
        Whether it is unsupported beside vLLM's own offloading, too.
    """

    feature: str
    why: str
    is_configured: Callable[[Any, Any], bool]
    blend_only: bool = False
    beside_offloading: bool = False


def _no_pages(_config: Any, kv: Any) -> bool:
    names = {type(spec).__name__ for spec in upstream.specs(kv)}
    known = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec"}
    return bool(names - known) or _any(kv, "attention_chunk_size")


def _any(kv: Any, name: str) -> bool:
    """Tell whether a layer's cache specification has this attribute set."""
    return any(getattr(spec, name, None) for spec in upstream.specs(kv))


def _quantized_kv(config: Any) -> bool:
    return config.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16")


REFUSALS: tuple[UnsupportedFeature, ...] = (
    UnsupportedFeature(
        "mode blend with MLA on a CPU without AMX",
        "vLLM's prefill attends to nothing in the cache there, and a blend's rows attend to those "
        "of donors",
        lambda config, kv: upstream.decodes_alone_behind(config),
        blend_only=True,
    ),
    UnsupportedFeature(
        "mode blend with MLA",
        "a token has one latent row, and blends read, move and write K and V of one width",
        lambda config, kv: (
            bool(config.model_config.use_mla) and not upstream.decodes_alone_behind(config)
        ),
        blend_only=True,
    ),
    UnsupportedFeature(
        "mode blend with quantized KV (fp8 and the like)",
        "moved keys would be rounded a second time",
        lambda config, kv: _quantized_kv(config),
        blend_only=True,
    ),
    UnsupportedFeature(
        "quantized KV with scales of the first request",
        "what is stored would have to be read with other scales",
        lambda config, kv: (
            _quantized_kv(config)
            and bool(getattr(config.cache_config, "calculate_kv_scales", False))
        ),
        beside_offloading=True,
    ),
    UnsupportedFeature(
        "chunked local attention, or a cache that is not of pages of tokens",
        "a prompt's state is not whole, or not shown to be",
        _no_pages,
        beside_offloading=True,
    ),
    UnsupportedFeature(
        "mode blend with sliding windows whose blocks are freed",
        "a blend recomputes rows of the whole prompt, and those outside of a window have no block: "
        "--disable-hybrid-kv-cache-manager keeps all blocks if some layers have no window",
        lambda config, kv: upstream.drops_blocks(kv),
        blend_only=True,
    ),
    UnsupportedFeature(
        "mode blend with more than one KV cache group",
        "a blend's rows are written by one block table for all layers",
        lambda config, kv: len(kv.kv_cache_groups) > 1 and not upstream.drops_blocks(kv),
        blend_only=True,
    ),
    UnsupportedFeature(
        "KV cache groups with blocks of several sizes",
        "a page is what all layers hold for as many tokens",
        lambda config, kv: (
            len({group.kv_cache_spec.block_size for group in kv.kv_cache_groups}) != 1
        ),
        beside_offloading=True,
    ),
    UnsupportedFeature(
        "tensor parallelism over nodes or without distributed_executor_backend='mp'",
        "not shown: the scheduler looks for every rank's part of a prompt's state in one folder",
        lambda config, kv: (
            rank_count(config) > 1
            and (
                config.parallel_config.nnodes > 1
                or config.parallel_config.distributed_executor_backend != "mp"
            )
        ),
    ),
    UnsupportedFeature(
        f"mode blend with max_num_batched_tokens below {2 * CHECKED_ROWS}",
        "no step would have room for the check of the model",
        lambda config, kv: config.scheduler_config.max_num_batched_tokens < 2 * CHECKED_ROWS,
        blend_only=True,
    ),
    UnsupportedFeature(
        "mode blend with data parallelism of a mixture of experts",
        "the ranks exchange tokens in every forward, and a blend's rows are one rank's alone",
        lambda config, kv: (
            config.parallel_config.data_parallel_size > 1
            and config.parallel_config.is_moe_model is not False
        ),
        blend_only=True,
    ),
    UnsupportedFeature(
        "pipeline parallelism",
        "not shown: each rank would hold its own layers of a prompt's state",
        lambda config, kv: config.parallel_config.pipeline_parallel_size > 1,
        beside_offloading=True,
    ),
    UnsupportedFeature(
        "context parallelism",
        "not shown: blocks are spread over ranks",
        lambda config, kv: (
            config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
        ),
        beside_offloading=True,
    ),
    UnsupportedFeature(
        "mode blend with speculative decoding",
        "a blend's rows go through the layers of the served model alone",
        lambda config, kv: config.speculative_config is not None,
        blend_only=True,
    ),
    UnsupportedFeature(
        "pooling models",
        "they generate nothing, so there is no prefill to save",
        lambda config, kv: config.model_config.runner_type == "pooling",
        beside_offloading=True,
    ),
    UnsupportedFeature(
        "encoder-decoder models",
        "cross-attention state is not part of a prompt's stored state",
        lambda config, kv: bool(config.model_config.is_encoder_decoder),
        beside_offloading=True,
    ),
    UnsupportedFeature(
        "a kv_role other than kv_both",
        "this connector both saves and loads",
        lambda config, kv: config.kv_transfer_config.kv_role != "kv_both",
        beside_offloading=True,
    ),
)

_LEFT_OVER = (
    "in vLLM's host memory such a chunk has bytes of other requests where it has none of its own, "
    "and they would be stored"
)
OFFLOADING_REFUSALS: tuple[UnsupportedFeature, ...] = (
    *(item for item in REFUSALS if item.beside_offloading),
    UnsupportedFeature(
        "speculative decoding",
        "not shown: use DejaKVConnector with mode exact",
        lambda config, kv: config.speculative_config is not None,
    ),
    UnsupportedFeature(
        "recurrent layers",
        "not shown: use DejaKVConnector",
        lambda config, kv: bool(upstream.recurrent_groups(kv)),
    ),
    UnsupportedFeature(
        "LoRA adapters",
        "vLLM names state by an adapter's name, which other weights may have later: use "
        "DejaKVConnector",
        lambda config, kv: config.lora_config is not None,
    ),
    UnsupportedFeature(
        "KV cache groups of different sizes",
        _LEFT_OVER,
        lambda config, kv: (
            len(set(upstream.group_bytes(kv))) > 1
            or (len(kv.kv_cache_groups) > 1 and _any(kv, "page_size_padded"))
        ),
    ),
    UnsupportedFeature(
        "sliding windows with offload chunks of several blocks",
        _LEFT_OVER,
        lambda config, kv: upstream.drops_blocks(kv) and upstream.blocks_per_chunk(config, kv) > 1,
    ),
    UnsupportedFeature(
        "a --prefix-caching-hash-algo other than sha256 or sha256_cbor",
        "clients can make prompts that have the same name",
        lambda config, kv: (
            not str(config.cache_config.prefix_caching_hash_algo).startswith("sha256")
        ),
    ),
)
"""What `DejaKVOffloadingConnector` does not support."""


def refuse_beside_others(
    vllm_config: Any, engine: Any | None, settings: ConnectorSettings, connector_class: type
) -> None:
    """Refuse settings of MultiConnector under which this connector would do harm.

    Parameters
    ----------
    vllm_config : VllmConfig
        Settings that vLLM gave the connector.
    engine : KVTransferConfig or None
        KV transfer settings of the engine. None where they are not known: vLLM's worker tells, its
        scheduler does not.
    settings : ConnectorSettings
        Settings of this connector.
    connector_class : type
        Class of this connector.

    Raises
    ------
    ConfigError
        MultiConnector has this class twice, a blend may be asked for below it, or a failed load
        would fail its request.
    """
    # Below MultiConnector a connector is given settings of its own.
    if engine is None or engine is vllm_config.kv_transfer_config:
        return
    if sum(issubclass(each, connector_class) for each, _ in upstream.connectors_of(engine)) > 1:
        raise ConfigError(
            "MultiConnector has DejaKVConnector twice, and both would answer a request under one "
            "name, which ends vLLM's engine: leave"
            " one out. A bucket with a folder in front is one connector: set store to the bucket "
            "and disk_dir to the folder"
        )

    if settings.may_blend:
        raise ConfigError(
            "blend below MultiConnector: other connectors would keep approximate state as exact. "
            "Run DejaKVConnector alone, or"
            " leave blend out of mode and modes"
        )

    if engine.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "a state that cannot be loaded would fail its request: add "
            '"kv_load_failure_policy": "recompute" beside'
            f' "kv_connector": "{engine.kv_connector}" in --kv-transfer-config'
        )


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
    """Refuse to start with an unsupported feature.

    Raises
    ------
    ConfigError
        Names every configured feature that is unsupported, with its reason.
    """
    # With recurrent layers a blend is refused request by request.
    may_blend = settings.may_blend and not upstream.recurrent_groups(kv_cache_config)
    features = [item for item in REFUSALS if may_blend or not item.blend_only]
    refuse("DejaKVConnector", features, vllm_config, kv_cache_config)


def refuse(
    connector: str, features: Iterable[UnsupportedFeature], vllm_config: Any, kv_cache_config: Any
) -> None:
    """Refuse to start a connector with any of these features.

    Raises
    ------
    ConfigError
        Names every configured feature, with its reason.
    """
    problems = [
        f"{item.feature} ({item.why})"
        for item in features
        if item.is_configured(vllm_config, kv_cache_config)
    ]
    if problems:
        raise ConfigError(
            f"{connector} does not support: {'; '.join(problems)}. Run without "
            "--kv-transfer-config, or without these"
        )

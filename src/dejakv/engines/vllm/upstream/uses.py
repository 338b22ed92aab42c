# pyright: reportMissingImports=false
"""The table of every use of what vLLM does not promise (`USES`)."""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    pass


Feature = Literal["exact", "blend", "events", "memory", "pictures", "recurrent", "run", "tier"]


@dataclass(frozen=True)
class UpstreamUse:
    """One use of a class or function of vLLM.

    Attributes
    ----------
    where : str
        A module, or `module:name` of a class or function in it.
    names : str
        Used names of the module, attributes of the class's instances, or parameters of the
        function.
    breaks : str
        What does not work without it.
    feature : Feature
        What needs it. Every feature needs the uses of `exact`.
    seen : str
        Oldest and newest version that it was seen to work with.
    """

    where: str
    names: str
    breaks: str
    feature: Feature = "exact"
    seen: str = "0.31.0 to 0.33.0"

    def missing(self) -> list[str]:
        """Return the names that this vLLM lacks."""
        module, _, name = self.where.partition(":")
        try:
            target: Any = importlib.import_module(module)
            target = getattr(target, name) if name else target
        except (ImportError, AttributeError):
            return [self.where]
        return [
            f"{self.where}.{attribute}"
            for attribute in self.names.split()
            if not _has(target, attribute)
        ]


def _uses(feature: Feature, seen: str, *uses: tuple[str, str, str]) -> Iterator[UpstreamUse]:
    """Yield uses of one feature, each given by `where`, `names` and `breaks`."""
    for use in uses:
        yield UpstreamUse(*use, feature, seen)


_ONE, _BOTH = "0.32.0", "0.31.0 and 0.32.0"
_REQUEST = (
    "request_id status priority prompt_token_ids prompt_embeds mm_features num_prompt_tokens "
    "num_computed_tokens num_output_tokens"
    " num_tokens all_token_ids num_preemptions"
    " sampling_params pooling_params cache_salt lora_request kv_transfer_params "
    "skip_reading_prefix_cache resumable"
)
_STEP = "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs"
_POOL = "num_gpu_blocks get_num_free_blocks cached_block_hash_to_block"
_LORA = (
    "lora_dtype target_modules enable_moe_shared_loras enable_mixed_moe_lora_format "
    "enable_tower_connector_lora"
)
_SELECTED = "head_size dtype kv_cache_dtype use_mla num_heads"
_METADATA = (
    "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs "
    "num_actual_tokens max_query_len max_seq_len"
    " block_table_tensor slot_mapping causal is_prefilling positions"
)
_CONTEXT = "attn_metadata vllm_config num_tokens slot_mapping skip_compiled"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
_ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding"
_EVENTS = "vllm.distributed.kv_events"
_OFFLOAD = "vllm.v1.kv_offload"
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
USES = (
    UpstreamUse("vllm.v1.request:Request", _REQUEST, "no request can be looked up"),
    UpstreamUse(
        "vllm.v1.request:RequestStatus", "FINISHED_ABORTED", "aborted requests would be stored"
    ),
    UpstreamUse(
        "vllm.v1.core.sched.output:SchedulerOutput",
        _STEP,
        "it is not known when a prompt is computed",
    ),
    UpstreamUse(
        "vllm.v1.core.sched.output:CachedRequestData",
        "req_ids num_computed_tokens",
        "nothing is stored",
    ),
    UpstreamUse(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "block_pool get_block_ids",
        "no block can be saved",
    ),
    UpstreamUse("vllm.v1.core.block_pool:BlockPool", _POOL, "a reset is not known to be whole"),
    UpstreamUse(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        "kv_cache_groups",
        "the KV cache's shape is not known",
    ),
    UpstreamUse(
        "vllm.config:CompilationConfig",
        "static_forward_context",
        "no layer is found for its KV cache",
    ),
    UpstreamUse(
        "vllm.config",
        "get_current_vllm_config_or_none",
        "a policy that fails requests is not noticed",
    ),
    UpstreamUse(
        "vllm.v1.worker.worker_base:WorkerBase",
        "get_model",
        "a change of weights is not noticed",
        seen=_ONE,
    ),
    UpstreamUse(
        "vllm.config",
        "set_current_vllm_config",
        "another backend's state would be exact",
        seen=_BOTH,
    ),
    UpstreamUse(
        "vllm.config:AttentionConfig",
        "compute_hash",
        "another backend's state would be exact",
        seen=_BOTH,
    ),
    UpstreamUse("vllm.platforms", "current_platform", "no device is known", seen=_BOTH),
    UpstreamUse(
        "torch.cpu",
        "_is_amx_tile_supported",
        "another processor's pages would be exact",
        seen=_BOTH,
    ),
    UpstreamUse(
        "vllm.envs",
        "VLLM_BATCH_INVARIANT VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_USE_MODELSCOPE "
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        "bits, adapters and weights are taken for others",
        seen=_BOTH,
    ),
    UpstreamUse(
        _FACTORY, "register_connector", "statistics below MultiConnector end the server", seen=_BOTH
    ),
    UpstreamUse(
        _FACTORY, "get_connector_class", "a second DejaKVConnector ends the server", seen=_ONE
    ),
    UpstreamUse(
        "vllm.v1.attention.backend:AttentionBackend",
        "forward_includes_kv_cache_update",
        "no state is put into blocks: where it is false, `do_kv_cache_update` of the layer's "
        "`impl` does so",
    ),
    UpstreamUse(
        "vllm.v1.attention.selector:get_attn_backend",
        _SELECTED,
        "another backend's state would be exact",
    ),
    UpstreamUse(
        "vllm.distributed",
        "get_tp_group get_tensor_model_parallel_rank",
        "ranks do not know their heads",
    ),
    UpstreamUse(
        "vllm.platforms.interface:Platform",
        "device_type get_device_name get_punica_wrapper",
        "no device is known",
    ),
    UpstreamUse(
        "vllm.config.lora:LoRAConfig", _LORA, "state of one adapter would be another one's"
    ),
    UpstreamUse(
        "vllm.config.speculative:SpeculativeConfig",
        "draft_model_config draft_load_config num_speculative_tokens",
        "state of one draft model would be another one's",
        seen=_ONE,
    ),
    *_uses(
        "blend",
        _ONE,
        ("vllm.sampling_params:RequestOutputKind", "DELTA", "no answer is blended"),
        (
            "vllm.v1.request:Request",
            "block_hashes _block_hasher",
            "blends would be served as exact",
        ),
        (
            "vllm.v1.core.block_pool:BlockPool",
            "get_cached_block take_events",
            "blends would not be shared, and would be published",
        ),
        (
            "vllm.v1.kv_cache_interface:KVCacheConfig",
            "hash_block_size",
            "exact blocks would not be found",
        ),
        (
            "vllm.v1.core.sched.scheduler:Scheduler",
            "schedule max_num_scheduled_tokens scheduler_config",
            "blends get no room",
        ),
        (
            "vllm.config:SchedulerConfig",
            "long_prefill_token_threshold",
            "long prompts overtake blends",
        ),
        ("vllm.forward_context:set_forward_context", _CONTEXT, "no rows are recomputed"),
        ("vllm.v1.attention.backend:CommonAttentionMetadata", _METADATA, "no rows are recomputed"),
        (
            "vllm.v1.worker.utils:AttentionGroup",
            "layer_names build_metadata",
            "no rows are recomputed",
        ),
        (
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
            "attn_groups lookback_token_ids",
            "no rows are recomputed",
        ),
        ("vllm.v1.core.sched.interface", "SchedulerInterface", "blends get no room"),
        ("vllm.tokenizers", "cached_tokenizer_from_config", "ends of sentences are not known"),
        ("vllm.v1.attention.backend:AttentionImpl", "forward", "recomputed rows are not seen"),
        (
            "vllm.model_executor.layers.attention.attention:Attention",
            "sliding_window",
            "questions ask beyond windows",
        ),
        (_ROTARY, "cos_sin_cache is_neox_style", "keys cannot be moved"),
        ("vllm.lora.layers", "BaseLayerWithLoRA", "adapters would change blends of the base model"),
    ),
    UpstreamUse(
        "vllm.v1.worker.gpu_worker:Worker",
        "init_device determine_available_memory",
        "vLLM's budget does not know the connector's memory: the former sets `requested_memory`, "
        "the latter reads it",
        "memory",
        "0.32.0",
    ),
    UpstreamUse(
        "vllm.v1.core.encoder_cache_manager:EncoderCacheManager",
        "reset",
        "resets are not noticed",
        "pictures",
        _ONE,
    ),
    UpstreamUse(
        "vllm.v1.engine.core_client",
        "InprocClient",
        "resets fail behind a last answer of one token",
        seen=_ONE,
    ),
    *_uses(
        "events",
        _ONE,
        (_EVENTS, "BlockStored BlockRemoved AllBlocksCleared", "routers do not see the store"),
        (
            "vllm.v1.core.kv_cache_utils",
            "generate_block_hash_extra_keys to_event_extra_keys maybe_convert_block_hash",
            "routers do not see the store",
        ),
        (
            "vllm.v1.kv_cache_interface",
            "get_kv_cache_spec_kind get_kv_cache_spec_sliding_window",
            "routers do not see the store",
        ),
        ("vllm.v1.request:Request", "block_hashes all_token_ids", "routers do not see the store"),
    ),
    *_uses(
        "recurrent",
        _ONE,
        ("vllm.config:CacheConfig", "mamba_cache_mode use_replayssm", "states are not found"),
        (
            "vllm.v1.core.sched.output:KVConnectorBlockState",
            "boundary_state_offloads",
            "no recurrent state is stored",
        ),
        (
            "vllm.v1.core.sched.output:SchedulerOutput",
            "kv_connector_block_state",
            "no recurrent state is stored",
        ),
        (
            "vllm.v1.request:Request",
            "shared_prefix_boundary",
            "no recurrent state is kept where prompts part",
        ),
    ),
    *_uses(
        "run",
        _ONE,
        ("vllm.v1.engine.core_client:InprocClient", "engine_core", "saves are not waited for"),
        ("vllm.distributed", "cleanup_dist_env_and_memory", "a second engine does not start"),
        (
            "vllm.distributed.kv_transfer",
            "ensure_kv_transfer_shutdown get_kv_transfer_group has_kv_transfer_group",
            "a second engine does not start, and stored state is not found",
        ),
        (
            "vllm.distributed.ec_transfer",
            "get_ec_transfer has_ec_transfer",
            "encoder runs are not counted",
        ),
        ("vllm.exceptions", "VLLMClientError", "a wrong prompt ends the run"),
    ),
    *_uses(
        "tier",
        _ONE,
        (
            f"{_OFFLOAD}.base",
            "Locality LookupResult Medium OffloadingCounterMetadata RequestOffloadingContext",
            "there are no tiers",
        ),
        (
            f"{_OFFLOAD}.base:ReqContext",
            "req_id kv_transfer_params set_state",
            "there are no tiers",
        ),
        (
            f"{_OFFLOAD}.tiering.base",
            "JobResult SecondaryTierManager TransferJob",
            "there are no tiers",
        ),
        (
            f"{_OFFLOAD}.tiering.base:SecondaryTierManager",
            "lookup submit_store submit_load get_finished_jobs drain_jobs block_size_bytes",
            "no chunk is stored",
        ),
        (
            f"{_OFFLOAD}.tiering.async_lookup:AsyncLookupManager",
            "batch_lookup lookup flush cleanup mark_miss shutdown",
            "no chunk is looked up",
        ),
        (
            f"{_CONNECTORS}.offloading_connector:OffloadingConnector",
            "scheduler build_connector_meta update_connector_output reset_cache "
            "_max_loadable_tokens",
            "a tier does not know weights and tenants",
        ),
        (
            f"{_CONNECTORS}.offloading.common",
            "OffloadingConnectorMetadata OffloadingWorkerMetadata",
            "changed weights are not noticed",
        ),
        (
            f"{_CONNECTORS}.offloading.config",
            "build_offloading_config",
            "chunks of another layout would be loaded",
        ),
        (
            f"{_CONNECTORS}.offloading.metrics",
            "OffloadingConnectorStats",
            "damaged chunks are not counted",
        ),
    ),
)


def _has(kind: Any, name: str) -> bool:
    """Tell whether a function has the parameter, or instances of a class have the attribute.

    The attribute may be of the class, a field, or set by `__init__`.
    """
    if hasattr(kind, name) or name in getattr(kind, "__annotations__", {}):
        return True
    if inspect.isfunction(kind):
        return name in inspect.signature(kind).parameters

    # Attributes that an `__init__` sets are no attributes of the class.
    makers = (
        getattr(inspect.unwrap(each.__init__), "__code__", None)
        for each in getattr(kind, "__mro__", ())
    )
    return any(
        code is not None and (name in code.co_names or name in code.co_consts) for code in makers
    )

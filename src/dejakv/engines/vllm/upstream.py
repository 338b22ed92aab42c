# pyright: reportMissingImports=false
"""Every use of what vLLM does not promise.

`USES` is the list: where each use is, what breaks without it, and with which versions it was seen
to work. The check at the start (`usable`) names what is missing.

Promised, and used elsewhere too: the base classes of connectors and of their statistics,
`--worker-extension-cls`, `--ec-manager-config`, and the fields of the configurations and of the
`Request` that a connector's methods are given.

For a new version of vLLM: let `python -m research.upstream WHEEL` compare its source, run
`tests/engines/vllm/contracts` with it and set `RANGE`. Then run all of `tests/engines/vllm` and add
the version to `TESTED`.
"""

import copy
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dejakv.errors import ConfigError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("dejakv.vllm")

TESTED = ("0.32.0",)
"""Versions named by the package's extras, with which all of `tests/engines/vllm` ran."""
RANGE = ((0, 31), (0, 34))
"""Versions for `exact`: from the first on, below the last."""

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


def vllm_version() -> str:
    """Return the installed vLLM's version without its local part (`0.32.0+cpu` gives `0.32.0`)."""
    import vllm

    return vllm.__version__.split("+")[0]


def is_tested() -> bool:
    """Tell whether every use was seen to work with the installed version."""
    return vllm_version() in TESTED


def usable(feature: Feature, version: str | None = None) -> str:
    """Check the installed vLLM for a feature.

    `exact` runs with any version of `RANGE`, and the log names an untested one.

    Parameters
    ----------
    feature : Feature
        The feature that is to run.
    version : str or None
        Version to check; None for the installed one.

    Returns
    -------
    str
        Why blends are switched off, empty if they are not.

    Raises
    ------
    ConfigError
        The version is outside of `RANGE`, it is untested and the feature needs a tested one, or a
        name is missing.
    """
    version, tested = version or vllm_version(), ", ".join(TESTED)
    new, install = version not in TESTED, f"Install one of: {tested}"
    if not RANGE[0] <= tuple(map(int, version.split(".")[:2])) < RANGE[1]:
        first, last = (".".join(map(str, each)) for each in RANGE)
        raise ConfigError(
            f"vLLM {version} is not supported: `exact` runs with {first} and later, below {last}. "
            f"{install}"
        )

    if new and feature in ("pictures", "run", "tier"):
        raise ConfigError(
            f"vLLM {version} is not supported: {feature} leans on more of it than `exact` does. "
            f"{install}"
        )

    lost = [
        f"{name} ({use.breaks})"
        for use in USES
        if use.feature == "exact" or (use.feature == feature and not new)
        for name in use.missing()
    ]
    if lost:
        raise ConfigError(
            f"vLLM {version} is not supported: it has no {', '.join(lost)}. {install}"
        )

    off = (
        f"blend was not tested with vLLM {version} ({tested} was), so that requests run exactly"
        if new
        else ""
    )
    if new:
        log.warning(
            "vLLM %s was not tested (%s was): it has what exact reuse needs, so that runs",
            version,
            tested,
        )

    if feature != "blend":
        return ""
    if off:
        log.warning("%s", off)
    return off


def calling_scheduler() -> Any:
    """Return the scheduler that is creating this connector, whose budget leaves room to blends.

    Raises
    ------
    ConfigError
        No scheduler is on the call stack.
    """
    from vllm.v1.core.sched.interface import SchedulerInterface

    scheduler = _caller(SchedulerInterface)
    if scheduler is None:
        raise ConfigError("no scheduler makes this connector: blend runs in vLLM's engine alone")
    return scheduler


def calling_worker() -> Any | None:
    """Return the worker that is creating this connector or handing it the KV cache, if any."""
    from vllm.v1.worker.worker_base import WorkerBase

    return _caller(WorkerBase)


def is_stepped_by_hand() -> bool:
    """Tell whether the calling program makes the steps of the engine that is being created.

    It does for an `LLM` with `VLLM_ENABLE_V1_MULTIPROCESSING=0`, which makes no step while no
    request is unanswered.
    """
    from vllm.v1.engine.core_client import InprocClient

    return _caller(InprocClient) is not None


def seconds_to_stop() -> float:
    """Return how long a worker in a process of its own may store when vLLM stops.

    The worker gets these seconds, one more, and then SIGKILL (`v1/executor/multiproc_executor.py`).
    """
    from vllm import envs

    return float(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + 3)


def _caller(kind: type) -> Any | None:
    """Return the nearest object of this kind among those whose methods are running.

    vLLM hands a connector neither its scheduler nor its worker.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back

    return None


def connectors_of(transfer: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return all connectors that KV transfer settings name: their classes and extra settings.

    Those below (nested) MultiConnectors are among them (`v1/multi_connector.py`).
    """
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # MultiConnector holds the settings of its connectors as plain dictionaries.
    extra = transfer.kv_connector_extra_config
    below = extra.get("connectors") or ()
    children = [each for child in below for each in connectors_of(KVTransferConfig(**child))]
    return [(KVConnectorFactory.get_connector_class(transfer), extra), *children]


def engine_transfer() -> Any | None:
    """Return the engine's KV transfer settings while it creates a worker's connector.

    They are known below MultiConnector too; elsewhere they are None (`v1/worker/worker_base.py`).
    """
    from vllm.config import get_current_vllm_config_or_none

    engine = get_current_vllm_config_or_none()
    return None if engine is None else engine.kv_transfer_config


def leave_room(scheduler: Any, room: Callable[[], tuple[int, int]]) -> None:
    """Let each call of `schedule` leave tokens of its budget free.

    The budget and the limit for one prompt are attributes that `schedule` copies first of all
    (`v1/core/sched/scheduler.py`). Both are restored after the call, whatever was raised.

    The method of one scheduler is wrapped, and no class given for `--scheduler-cls`. Users would
    have to name that class, one for synchronous and one for asynchronous scheduling, and vLLM
    promises the base classes as little. Both change the same attributes.

    Parameters
    ----------
    scheduler : vllm.v1.core.sched.scheduler.Scheduler
        vLLM's scheduler.
    room : Callable[[], tuple[int, int]]
        Gives the tokens to leave free, and the maximum tokens of one prompt (0: vLLM's own limit).
    """
    schedule, config = scheduler.schedule, scheduler.scheduler_config

    def schedule_with_room(*args: Any, **kwargs: Any) -> Any:
        budget = scheduler.max_num_scheduled_tokens
        prompt_limit = config.long_prefill_token_threshold
        free, longest = room()
        scheduler.max_num_scheduled_tokens = max(0, budget - free)
        # 0 means no limit, so it must not be the minimum.
        config.long_prefill_token_threshold = min(filter(None, (longest, prompt_limit)), default=0)

        try:
            return schedule(*args, **kwargs)
        finally:
            scheduler.max_num_scheduled_tokens = budget
            config.long_prefill_token_threshold = prompt_limit

    scheduler.schedule = schedule_with_room


def register(connector: type) -> None:
    """Make a connector known by its name.

    MultiConnector looks up the classes of statistics by name (`v1/multi_connector.py`), and an
    unknown one ends the server.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(
            connector.__name__, connector.__module__, connector.__name__
        )

    except ValueError:
        log.debug("%s is registered already", connector.__name__)


def shows_label(request: Any) -> bool:
    """Tell whether the client's answer contains the connector's parameters for this request.

    vLLM leaves them out in streams (`DELTA`), for the second and later prompts of one call
    (`cmpl-...-1`), and for the beams of its beam search. A program that steps the engine itself has
    the parameters in each result.
    """
    params = request.sampling_params
    kind = getattr(params, "output_kind", None)

    # `LLM.beam_search` numbers its steps like any request. Nobody else asks for one token
    # without a copy of the parameters.
    beam_step = (
        getattr(params, "skip_clone", False) and params.max_tokens == 1 and bool(params.logprobs)
    )
    return (
        getattr(kind, "name", "DELTA") != "DELTA"
        and not beam_step
        and _WITHOUT_LABEL.search(request.request_id) is None
    )


def sibling_of(request_id: str) -> str:
    """Return the request whose sample this is (`n` above 1: `0_ID`, `1_ID`, ...), else "".

    The samples' answers are given out together, with the parameters of the one that ends last.
    """
    number, underscore, parent = request_id.partition("_")
    return parent if underscore and number.isdecimal() else ""


_WITHOUT_LABEL = re.compile(
    r"^(?:\d+_)?cmpl-.*-[1-9]\d*(?:-[0-9a-f]{8})?$|-beam-\d+(?:-[0-9a-f]{8})?$"
)


def was_aborted(request: Any) -> bool:
    """Tell whether a finished request was ended from outside.

    A pause ends all requests and resets the prefix cache at once, so their blocks may not be held
    for a copy (`v1/engine/core.py`).
    """
    from vllm.v1.request import RequestStatus

    return request.status == RequestStatus.FINISHED_ABORTED


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


def boundary_states(output: Any) -> Mapping[str, list[tuple[int, int, int]]]:
    """Return the recurrent states that a step leaves at ends of blocks, by request.

    A request's table does not tell where they are, since vLLM moves and drops states
    (`v1/core/kv_cache_manager.py`).

    Returns
    -------
    Mapping[str, list[tuple[int, int, int]]]
        KV cache group, block, and number of the tokens before the state.
    """
    block_state = output.kv_connector_block_state
    return {} if block_state is None else block_state.boundary_state_offloads


def keep_state_at(request: Any, tokens: int) -> None:
    """Let vLLM end a step behind so many tokens, and keep the recurrent state there.

    vLLM does so itself where its own prefix cache sees prompts part.
    """
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, tokens)


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


class RenamedBlocks:
    """Files one request's blocks from hash block `first` on under `name(hash)`.

    `KVCacheManager.allocate_slots` ends in `cache_blocks`, which files every full block under
    `Request.block_hashes`, those of the answer too, and a request finds blocks under its own
    hashes. Without other names approximate state would be served to exact requests. vLLM's hash of
    a block chains from the block before it (`Request._block_hasher`), so the request's own hashes
    are kept here.
    """

    def __init__(self, request: Any, first: int, name: Callable[[bytes], bytes]) -> None:
        self._name = name
        self._hashes, self._hasher = list(request.block_hashes), request._block_hasher
        request._block_hasher = self
        self.move(request, first)

    def __call__(self, request: Any) -> list[bytes]:
        """Hash the request's new full blocks, in place of vLLM's hasher."""
        # vLLM chains from the request's last hash, which must be its own one.
        names, request.block_hashes = request.block_hashes, self._hashes
        try:
            new = self._hasher(request)
        finally:
            request.block_hashes = names

        self._hashes += new
        return [self._name(block_hash) for block_hash in new]

    def move(self, request: Any, first: int) -> None:
        """File blocks from hash block `first` on under `name(hash)`, others under their hashes."""
        self.first = first
        request.block_hashes[:] = [*self._hashes[:first], *map(self._name, self._hashes[first:])]

    def restore(self, request: Any) -> None:
        """File all blocks under their own hashes; vLLM hashes the next ones."""
        request.block_hashes[:] = self._hashes
        request._block_hasher = self._hasher


def is_cached(kv_cache_manager: Any, block_hash: bytes) -> bool:
    """Tell whether vLLM's prefix cache has a block under this hash."""
    return kv_cache_manager.block_pool.get_cached_block(block_hash, [0]) is not None


def hide_events(kv_cache_manager: Any, hidden: Callable[[bytes | int], bool]) -> None:
    """Remove blocks whose hash is `hidden` from vLLM's published KV events.

    vLLM gathers events while it schedules and, for answers, after a step
    (`v1/core/sched/async_scheduler.py`). In an event hidden blocks come last, since a prompt's
    approximate blocks lie behind its exact ones.
    """
    pool = kv_cache_manager.block_pool
    take = pool.take_events

    def visible_events() -> Iterator[Any]:
        for event in take():
            # The event of a reset has no hashes.
            hashes = getattr(event, "block_hashes", [])
            visible_count = len(hashes) - sum(map(hidden, hashes))
            # Only an event of stored blocks has several: blocks are removed one by one.
            if 0 < visible_count < len(hashes):
                event.block_hashes = hashes[:visible_count]
                event.token_ids = event.token_ids[: visible_count * event.block_size]
                event.extra_keys = event.extra_keys and event.extra_keys[:visible_count]

            if visible_count or not hashes:
                yield event

    pool.take_events = lambda: list(visible_events())


def publishes_events(vllm_config: Any) -> bool:
    """Tell whether vLLM publishes KV events (`--kv-events-config`)."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and config.enable_kv_cache_events


def event_extra_keys(request: Any, blocks: int, tokens: int) -> list[Any] | None:
    """Return what the hashes of a request's first blocks were made of beside tokens.

    Parameters
    ----------
    request : vllm.v1.request.Request
        The request.
    blocks : int
        Number of blocks.
    tokens : int
        Tokens of a block.
    """
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    keys: list[Any] = []
    medium = 0
    for first in range(0, blocks * tokens, tokens):
        block_keys, medium = generate_block_hash_extra_keys(request, first, first + tokens, medium)
        keys.append(block_keys)
    return to_event_extra_keys(keys)


def stored_event(
    kv_cache_config: Any,
    *,
    hashes: list[bytes],
    parent: bytes | None,
    medium: str,
    owner: str,
    **fields: Any,
) -> Any:
    """Make vLLM's event of stored blocks, as its own block pool does."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    shown: list[Any] = [maybe_convert_block_hash(each) for each in hashes]
    return BlockStored(
        block_hashes=shown,
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        block_size=spec.block_size,
        medium=medium,
        group_idx=0,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        ownership=owner,
        **fields,
    )


def removed_event(hashes: list[bytes], *, medium: str, owner: str) -> Any:
    """Make vLLM's event of removed blocks."""
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    shown: list[Any] = [maybe_convert_block_hash(each) for each in hashes]
    return BlockRemoved(block_hashes=shown, medium=medium, group_idx=0, ownership=owner)


def watch_clears(kv_cache_manager: Any, cleared: Callable[[], None]) -> None:
    """Call `cleared` whenever vLLM publishes that all blocks are gone."""
    from vllm.distributed.kv_events import AllBlocksCleared

    pool = kv_cache_manager.block_pool
    take = pool.take_events

    def watched_events() -> list[Any]:
        events = take()
        if any(isinstance(event, AllBlocksCleared) for event in events):
            cleared()
        return events

    pool.take_events = watched_events


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


def ranks_group() -> Any:
    """Return the process group of the tensor-parallel ranks, for tensors in host memory."""
    from vllm.distributed import get_tp_group

    return get_tp_group().cpu_group


def rank() -> int:
    """Return this worker's tensor-parallel rank.

    The process groups exist before the connector does (`v1/worker/gpu_worker.py`).
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


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


def connector_of(llm: Any) -> Any:
    """Return the scheduler's connector of an offline `LLM` in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def has_work(llm: Any) -> bool:
    """Tell whether an offline `LLM` in this process has requests or orders left.

    Orders are those of the connector to its worker.
    """
    return llm.llm_engine.engine_core.engine_core.scheduler.has_requests()

# pyright: reportMissingImports=false
"""Every use of what vLLM does not promise. `USES` is the list: where it is, what breaks without it, and with which versions it was seen
to work. The check at the start (`usable`) names what is missing.

Promised, and used elsewhere too: the base classes of connectors and of their statistics, `--worker-extension-cls`, `--ec-manager-config`,
and the fields of the configurations and of the `Request` that a connector's methods are given.

A new version: read the files named below in its source, run `tests/engines/vllm/contracts` with it and set `RANGE`; run all of
`tests/engines/vllm` and add it to `TESTED`.
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
"""Versions of the package's extras, with which all of `tests/engines/vllm` ran."""
RANGE = ((0, 31), (0, 34))
"""Versions for `exact`: from the first on, below the last."""

Part = Literal["exact", "blend", "pictures", "run"]


@dataclass(frozen=True)
class UpstreamUse:
    """One use of a class or function of vLLM's.

    where   a module, or `module:name` of a class or function in it
    names   used names of the module, attributes of the class's instances, or parameters of the function
    breaks  what does not work without it
    part    what needs it; all need `exact`
    seen    oldest and newest version that it was seen to work with
    """

    where: str
    names: str
    breaks: str
    part: Part = "exact"
    seen: str = "0.31.0 to 0.33.0"

    def missing(self) -> list[str]:
        """Names that this vLLM lacks."""
        module, _, name = self.where.partition(":")
        try:
            target: Any = importlib.import_module(module)
            target = getattr(target, name) if name else target
        except (ImportError, AttributeError):
            return [self.where]
        return [f"{self.where}.{attribute}" for attribute in self.names.split() if not _has(target, attribute)]


_ONE, _BOTH = "0.32.0", "0.31.0 and 0.32.0"
_REQUEST = (
    "request_id status priority prompt_token_ids prompt_embeds mm_features num_prompt_tokens num_computed_tokens num_output_tokens"
    " num_tokens num_preemptions"
    " sampling_params pooling_params cache_salt lora_request kv_transfer_params skip_reading_prefix_cache resumable"
)
_STEP = "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs"
_POOL = "num_gpu_blocks get_num_free_blocks cached_block_hash_to_block"
_LORA = "lora_dtype target_modules enable_moe_shared_loras enable_mixed_moe_lora_format enable_tower_connector_lora"
_SELECTED = "head_size dtype kv_cache_dtype use_mla num_heads"
_METADATA = (
    "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs num_actual_tokens max_query_len max_seq_len"
    " block_table_tensor slot_mapping causal is_prefilling positions"
)
_CONTEXT = "attn_metadata vllm_config num_tokens slot_mapping skip_compiled"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
_ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding"
USES = (
    UpstreamUse("vllm.v1.request:Request", _REQUEST, "no request can be looked up"),
    UpstreamUse("vllm.v1.request:RequestStatus", "FINISHED_ABORTED", "aborted requests would be stored"),
    UpstreamUse("vllm.v1.core.sched.output:SchedulerOutput", _STEP, "it is not known when a prompt is computed"),
    UpstreamUse("vllm.v1.core.sched.output:CachedRequestData", "req_ids num_computed_tokens", "nothing is stored"),
    UpstreamUse("vllm.v1.core.kv_cache_manager:KVCacheManager", "block_pool get_block_ids", "no block can be saved"),
    UpstreamUse("vllm.v1.core.block_pool:BlockPool", _POOL, "a reset is not known to be whole"),
    UpstreamUse("vllm.v1.kv_cache_interface:KVCacheConfig", "kv_cache_groups", "the KV cache's shape is not known"),
    UpstreamUse("vllm.config:CompilationConfig", "static_forward_context", "no layer is found for its KV cache"),
    UpstreamUse("vllm.config", "get_current_vllm_config_or_none", "a policy that fails requests is not noticed"),
    UpstreamUse("vllm.v1.worker.worker_base:WorkerBase", "get_model", "a change of weights is not noticed", seen=_ONE),
    UpstreamUse("vllm.config", "set_current_vllm_config", "another backend's state would be exact", seen=_BOTH),
    UpstreamUse("vllm.config:AttentionConfig", "compute_hash", "another backend's state would be exact", seen=_BOTH),
    UpstreamUse("vllm.platforms", "current_platform", "no device is known", seen=_BOTH),
    UpstreamUse("torch.cpu", "_is_amx_tile_supported", "another processor's pages would be exact", seen=_BOTH),
    UpstreamUse(
        "vllm.envs",
        "VLLM_BATCH_INVARIANT VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_USE_MODELSCOPE VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        "bits, adapters and weights are taken for others",
        seen=_BOTH,
    ),
    UpstreamUse(_FACTORY, "register_connector", "statistics below MultiConnector end the server", seen=_BOTH),
    UpstreamUse(_FACTORY, "get_connector_class", "a second DejaKVConnector ends the server", seen=_ONE),
    UpstreamUse(
        "vllm.v1.attention.backend:AttentionBackend",
        "forward_includes_kv_cache_update",
        "no state is put into blocks: where it is false, `do_kv_cache_update` of the layer's `impl` does so",
    ),
    UpstreamUse("vllm.v1.attention.selector:get_attn_backend", _SELECTED, "another backend's state would be exact"),
    UpstreamUse("vllm.distributed", "get_tp_group get_tensor_model_parallel_rank", "ranks do not know their heads"),
    UpstreamUse(
        "vllm.platforms.interface:Platform", "device_type get_device_name get_punica_wrapper", "no device is known"
    ),
    UpstreamUse("vllm.config.lora:LoRAConfig", _LORA, "state of one adapter would be another one's"),
    UpstreamUse("vllm.sampling_params:RequestOutputKind", "DELTA", "no answer is blended", "blend", _ONE),
    UpstreamUse(
        "vllm.v1.request:Request", "block_hashes _block_hasher", "blends would be served as exact", "blend", _ONE
    ),
    UpstreamUse(
        "vllm.v1.core.block_pool:BlockPool",
        "get_cached_block take_events",
        "blends would not be shared, and would be published",
        "blend",
        _ONE,
    ),
    UpstreamUse(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        "hash_block_size",
        "exact blocks would not be found",
        "blend",
        _ONE,
    ),
    UpstreamUse(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "schedule max_num_scheduled_tokens scheduler_config",
        "blends get no room",
        "blend",
        _ONE,
    ),
    UpstreamUse(
        "vllm.config:SchedulerConfig", "long_prefill_token_threshold", "long prompts overtake blends", "blend", _ONE
    ),
    UpstreamUse("vllm.forward_context:set_forward_context", _CONTEXT, "no rows are recomputed", "blend", _ONE),
    UpstreamUse(
        "vllm.v1.attention.backend:CommonAttentionMetadata", _METADATA, "no rows are recomputed", "blend", _ONE
    ),
    UpstreamUse(
        "vllm.v1.worker.utils:AttentionGroup", "layer_names build_metadata", "no rows are recomputed", "blend", _ONE
    ),
    UpstreamUse(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        "attn_groups lookback_token_ids",
        "no rows are recomputed",
        "blend",
        _ONE,
    ),
    UpstreamUse("vllm.v1.core.sched.interface", "SchedulerInterface", "blends get no room", "blend", _ONE),
    UpstreamUse("vllm.tokenizers", "cached_tokenizer_from_config", "ends of sentences are not known", "blend", _ONE),
    UpstreamUse("vllm.v1.attention.backend:AttentionImpl", "forward", "recomputed rows are not seen", "blend", _ONE),
    UpstreamUse(_ROTARY, "cos_sin_cache is_neox_style", "keys cannot be moved", "blend", _ONE),
    UpstreamUse(
        "vllm.lora.layers", "BaseLayerWithLoRA", "adapters would change blends of the base model", "blend", _ONE
    ),
    UpstreamUse(
        "vllm.v1.core.encoder_cache_manager:EncoderCacheManager", "reset", "resets are not noticed", "pictures", _ONE
    ),
    UpstreamUse(
        "vllm.v1.engine.core_client", "InprocClient", "resets fail behind a last answer of one token", seen=_ONE
    ),
    UpstreamUse("vllm.v1.engine.core_client:InprocClient", "engine_core", "saves are not waited for", "run", _ONE),
    UpstreamUse("vllm.distributed", "cleanup_dist_env_and_memory", "a second engine does not start", "run", _ONE),
    UpstreamUse(
        "vllm.distributed.kv_transfer",
        "ensure_kv_transfer_shutdown get_kv_transfer_group has_kv_transfer_group",
        "a second engine does not start, and stored state is not found",
        "run",
        _ONE,
    ),
    UpstreamUse(
        "vllm.distributed.ec_transfer", "get_ec_transfer has_ec_transfer", "encoder runs are not counted", "run", _ONE
    ),
    UpstreamUse("vllm.exceptions", "VLLMClientError", "a wrong prompt ends the run", "run", _ONE),
)


def _has(kind: Any, name: str) -> bool:
    """Whether instances of a class have the attribute (of the class, a field, or set by `__init__`), or a function the parameter."""
    if hasattr(kind, name) or name in getattr(kind, "__annotations__", {}):
        return True
    if inspect.isfunction(kind):
        return name in inspect.signature(kind).parameters
    # Attributes that an `__init__` sets are no attributes of the class.
    makers = (getattr(inspect.unwrap(each.__init__), "__code__", None) for each in getattr(kind, "__mro__", ()))
    return any(code is not None and (name in code.co_names or name in code.co_consts) for code in makers)


def vllm_version() -> str:
    """Version of the installed vLLM without its local part (`0.32.0+cpu` gives `0.32.0`)."""
    import vllm

    return vllm.__version__.split("+")[0]


def is_tested() -> bool:
    """Whether every use was seen to work with the installed version."""
    return vllm_version() in TESTED


def usable(feature: Part, version: str | None = None) -> str:
    """Why `blend` is switched off with this vLLM, empty if it is not. `exact` runs with any version of the range; the log names untested
    ones. Raises: ConfigError for versions outside of it, for other parts with an untested one, and for missing names."""
    version, tested = version or vllm_version(), ", ".join(TESTED)
    new, install = version not in TESTED, f"Install one of: {tested}"
    if not RANGE[0] <= tuple(map(int, version.split(".")[:2])) < RANGE[1]:
        first, last = (".".join(map(str, each)) for each in RANGE)
        raise ConfigError(
            f"vLLM {version} is not supported: `exact` runs with {first} and later, below {last}. {install}"
        )

    if new and feature in ("pictures", "run"):
        raise ConfigError(
            f"vLLM {version} is not supported: {feature} leans on more of it than `exact` does. {install}"
        )

    lost = [
        f"{name} ({use.breaks})"
        for use in USES
        if use.part == "exact" or (use.part == feature and not new)
        for name in use.missing()
    ]
    if lost:
        raise ConfigError(f"vLLM {version} is not supported: it has no {', '.join(lost)}. {install}")

    off = f"blend was not tested with vLLM {version} ({tested} was), so that requests run exactly" if new else ""
    if new:
        log.warning("vLLM %s was not tested (%s was): it has what exact reuse needs, so that runs", version, tested)
    if feature != "blend":
        return ""
    if off:
        log.warning("%s", off)
    return off


def calling_scheduler() -> Any:
    """The scheduler that is making this connector. Its budget leaves room to blends. Raises: ConfigError without one."""
    from vllm.v1.core.sched.interface import SchedulerInterface

    scheduler = _caller(SchedulerInterface)
    if scheduler is None:
        raise ConfigError("no scheduler makes this connector: blend runs in vLLM's engine alone")
    return scheduler


def calling_worker() -> Any | None:
    """The worker that is making this connector or handing it the KV cache; None without one."""
    from vllm.v1.worker.worker_base import WorkerBase

    return _caller(WorkerBase)


def is_stepped_by_hand() -> bool:
    """Whether the scheduler that is being made is of an engine in its caller's process, who makes its steps: an `LLM` with
    `VLLM_ENABLE_V1_MULTIPROCESSING=0`. It makes none while no request is unanswered."""
    from vllm.v1.engine.core_client import InprocClient

    return _caller(InprocClient) is not None


def seconds_to_stop() -> float:
    """How long a worker in a process of its own may store when vLLM stops: it gets this many seconds, 4 more, and then SIGKILL
    (`v1/executor/multiproc_executor.py`)."""
    from vllm import envs

    return float(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + 3)


def _caller(kind: type) -> Any | None:
    """The nearest object of this kind among those whose methods are running: vLLM hands a connector neither its scheduler nor its worker."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back
    return None


def connector_classes(transfer: Any) -> list[type]:
    """The classes of all connectors that KV transfer settings name, also below (nested) MultiConnectors (`v1/multi_connector.py`)."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    below = transfer.kv_connector_extra_config.get("connectors") or ()
    classes = [each for child in below for each in connector_classes(KVTransferConfig(**child))]
    return [KVConnectorFactory.get_connector_class(transfer), *classes]


def engine_transfer() -> Any | None:
    """The engine's KV transfer settings while it makes a worker's connector, also below MultiConnector; None elsewhere
    (`v1/worker/worker_base.py`)."""
    from vllm.config import get_current_vllm_config_or_none

    engine = get_current_vllm_config_or_none()
    return None if engine is None else engine.kv_transfer_config


def leave_room(scheduler: Any, room: Callable[[], tuple[int, int]]) -> None:
    """Let each call of `schedule` leave tokens of its budget free and limit the tokens of one prompt (0: as before), by `room`. Both are
    attributes that `schedule` copies first of all (`v1/core/sched/scheduler.py`). They are restored after the call, whatever was raised.

    The method of one scheduler is wrapped, and no class given for `--scheduler-cls`. Users would have to name that, one for synchronous and
    one for asynchronous scheduling, and vLLM promises the base classes as little. Both change the same attributes.
    """
    schedule, config = scheduler.schedule, scheduler.scheduler_config

    def within(*args: Any, **kwargs: Any) -> Any:
        budget, prompt_limit = scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold
        free, longest = room()
        scheduler.max_num_scheduled_tokens = max(0, budget - free)
        # 0 means no limit, so it must not be the minimum.
        config.long_prefill_token_threshold = min(filter(None, (longest, prompt_limit)), default=0)

        try:
            return schedule(*args, **kwargs)
        finally:
            scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = budget, prompt_limit

    scheduler.schedule = within


def register(connector: type) -> None:
    """Make a connector known by its name: MultiConnector looks up the classes of statistics by name (`v1/multi_connector.py`), and an
    unknown one ends the server."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)
    except ValueError:
        log.debug("%s is registered already", connector.__name__)


def shows_label(request: Any) -> bool:
    """Tell whether vLLM puts a connector's parameters for this request into the answer that the client gets.

    It does not in streams (`DELTA`), for the second and later prompts of one call (`cmpl-...-1`), nor for the beams of its beam search.
    A program that steps the engine itself has the parameters in each result.
    """
    params = request.sampling_params
    kind = getattr(params, "output_kind", None)

    # `LLM.beam_search` numbers its steps like any request; nobody else asks for one token without a copy of the parameters
    beam_step = getattr(params, "skip_clone", False) and params.max_tokens == 1 and bool(params.logprobs)
    return (
        getattr(kind, "name", "DELTA") != "DELTA"
        and not beam_step
        and _WITHOUT_LABEL.search(request.request_id) is None
    )


def sibling_of(request_id: str) -> str:
    """Return the request whose sample this is (`n` above 1: `0_ID`, `1_ID`, ...); empty for a request of its own.

    The samples' answers are given out together, with the parameters of the one that ends last.
    """
    number, underscore, parent = request_id.partition("_")
    return parent if underscore and number.isdecimal() else ""


_WITHOUT_LABEL = re.compile(r"^(?:\d+_)?cmpl-.*-[1-9]\d*(?:-[0-9a-f]{8})?$|-beam-\d+(?:-[0-9a-f]{8})?$")


def was_aborted(request: Any) -> bool:
    """Whether a finished request was ended from outside. A pause ends all and resets the prefix cache at once: their blocks may not be held
    for a copy (`v1/engine/core.py`)."""
    from vllm.v1.request import RequestStatus

    return request.status == RequestStatus.FINISHED_ABORTED


def prefix_cache_is_empty(kv_cache_manager: Any) -> bool:
    """Whether vLLM's own reset has taken place: it does nothing while blocks are in use (`v1/core/block_pool.py`), beside the
    null block."""
    pool = kv_cache_manager.block_pool
    return pool.num_gpu_blocks - pool.get_num_free_blocks() <= 1 and not len(pool.cached_block_hash_to_block)


def hash_block_tokens(kv_cache_config: Any) -> int:
    """Tokens of one entry of `Request.block_hashes`, perhaps fewer than a KV block's. 0.31, which blends nothing, does not tell."""
    return getattr(kv_cache_config, "hash_block_size", None) or block_tokens(kv_cache_config)


def block_tokens(kv_cache_config: Any) -> int:
    """Tokens in one KV block."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def bytes_per_token(kv_cache_config: Any) -> int:
    """Bytes of a token's KV in all layers, on one rank."""
    total = 0
    for group in kv_cache_config.kv_cache_groups:
        # The page of such a specification is of all its layers together.
        count = 1 if hasattr(group.kv_cache_spec, "kv_cache_specs") else len(group.layer_names)
        total += count * group.kv_cache_spec.page_size_bytes // group.kv_cache_spec.block_size
    return total


def groups_of(kv_cache_config: Any) -> dict[str, int]:
    """The KV cache group of each layer: layers of a group share a request's block table, those of others have the same memory."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {name: number for number, group in groups for name in group.layer_names}


def specs(kv_cache_config: Any) -> list[Any]:
    """Cache specification of each layer, or of all layers of a group if they are alike."""
    group_specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [layer_spec for spec in group_specs for layer_spec in getattr(spec, "kv_cache_specs", {"": spec}).values()]


def drops_blocks(kv_cache_config: Any) -> bool:
    """Whether a request loses blocks outside of a window while it runs: then its table has 0 in their place
    (`v1/core/single_type_kv_cache_manager.py`)."""
    return any(type(spec).__name__ == "SlidingWindowSpec" for spec in specs(kv_cache_config))


def page_layout(kv_cache_config: Any) -> list[str]:
    """The layout of a page's bytes, beside backend, device and dtype of the cache (`v1/kv_cache_interface.py`): order of axes, and of each
    group its layers and each one's part of a block. Kernel blocks follow from these, scales from the weights."""
    order = str(getattr(kv_cache_config, "kv_cache_layout", None))  # 0.31 has one order
    return [order, *(f"{group.layer_names}:{group.kv_cache_spec}" for group in kv_cache_config.kv_cache_groups)]


def attention_layers(vllm_config: Any, names: Any) -> dict[str, Any]:
    """The attention modules behind the registered KV caches, in the model's order."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: context[name] for name in names}


class RenamedBlocks:
    """Files one request's blocks from hash block `first` on under `name(hash)`, those of its answer too.

    `KVCacheManager.allocate_slots` ends in `cache_blocks`, which files every full block under `Request.block_hashes`, and a request finds
    blocks under its own: approximate state would be served to exact requests. vLLM's hash of a block chains from the one before it
    (`Request._block_hasher`), so its own hashes are kept here.
    """

    def __init__(self, request: Any, first: int, name: Callable[[bytes], bytes]) -> None:
        self._name = name
        self._own, self._hasher = list(request.block_hashes), request._block_hasher
        request._block_hasher = self
        self.move(request, first)

    def __call__(self, request: Any) -> list[bytes]:
        """Hash the request's new full blocks."""
        # vLLM chains from the request's last hash, which must be its own one.
        names, request.block_hashes = request.block_hashes, self._own
        try:
            new = self._hasher(request)
        finally:
            request.block_hashes = names
        self._own += new
        return [self._name(block_hash) for block_hash in new]

    def move(self, request: Any, first: int) -> None:
        """File blocks from hash block `first` on under `name(hash)`, those before it under their own hashes."""
        self.first = first
        request.block_hashes[:] = [*self._own[:first], *map(self._name, self._own[first:])]

    def restore(self, request: Any) -> None:
        """File all blocks under their own hashes; vLLM hashes the next ones."""
        request.block_hashes[:] = self._own
        request._block_hasher = self._hasher


def is_cached(kv_cache_manager: Any, block_hash: bytes) -> bool:
    """Whether vLLM's prefix cache has a block under this hash."""
    return kv_cache_manager.block_pool.get_cached_block(block_hash, [0]) is not None


def hide_events(kv_cache_manager: Any, hidden: Callable[[bytes | int], bool]) -> None:
    """Remove blocks whose hash is `hidden` from vLLM's published KV events. vLLM gathers events while it schedules and, of answers, after a
    step (`v1/core/sched/async_scheduler.py`). In an event such blocks come last: those of a prompt after its exact ones."""
    pool = kv_cache_manager.block_pool
    take = pool.take_events

    def shown() -> Iterator[Any]:
        for event in take():
            hashes = getattr(event, "block_hashes", [])  # a reset has none
            visible_count = len(hashes) - sum(map(hidden, hashes))
            if 0 < visible_count < len(hashes):  # of stored blocks: they are removed one by one
                event.block_hashes, event.token_ids = (
                    hashes[:visible_count],
                    event.token_ids[: visible_count * event.block_size],
                )
                event.extra_keys = event.extra_keys and event.extra_keys[:visible_count]

            if visible_count or not hashes:
                yield event

    pool.take_events = lambda: list(shown())


def device_name() -> str:
    """The kind of computing device: `cuda:NVIDIA H200`, or `cpu:cpu:AVX512:False` with the instructions (the last is AMX) by which kernels
    and the order of a page's bytes differ (`platforms`, `v1/attention/backends/cpu_attn.py`)."""
    import torch
    from vllm.platforms import current_platform

    name = f"{current_platform.device_type}:{current_platform.get_device_name()}"
    if not current_platform.is_cpu():
        return name
    return f"{name}:{torch.backends.cpu.get_cpu_capability()}:{torch.cpu._is_amx_tile_supported()}"


def attention_backend(vllm_config: Any) -> str:
    """vLLM's attention backend for this model, and its configuration. The layers themselves are in the worker, perhaps another process
    (`v1/attention/selector.py`)."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        try:
            backend = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                vllm_config.cache_config.cache_dtype,
                use_mla=model.use_mla,
                num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
            )
        except (ValueError, NotImplementedError) as error:  # a model without attention, beside an encoder connector
            log.debug("no attention backend: %s", error)
            return ""
    return f"{backend.__module__}.{backend.__qualname__}:{vllm_config.attention_config.compute_hash()}"


def arithmetic(vllm_config: Any) -> str:
    """The dtype of the model's state: `fp32`, `bf16` or `fp16`; empty for another one (`config/model.py`)."""
    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return names.get(str(vllm_config.model_config.dtype), "")


def is_batch_invariant() -> bool:
    """Whether a token's state has the same bits in any batch (`model_executor/determinism`): a mode of CUDA's kernels alone."""
    from vllm import envs
    from vllm.platforms import current_platform

    return bool(envs.VLLM_BATCH_INVARIANT) and current_platform.is_cuda()


def ranks_group() -> Any:
    """The process group of the tensor-parallel ranks, of tensors in host memory (`distributed/parallel_state.py`)."""
    from vllm.distributed import get_tp_group

    return get_tp_group().cpu_group


def rank() -> int:
    """This worker's tensor-parallel rank; its process groups exist before its connector does (`v1/worker/gpu_worker.py`)."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def adapters_applied(vllm_config: Any) -> dict[str, object]:
    """Settings that decide, beside its files, the effect of a LoRA adapter (`config/lora.py`)."""
    lora = vllm_config.lora_config
    names = ("lora_dtype", "target_modules", "enable_moe_shared_loras", "enable_mixed_moe_lora_format")
    applied: dict[str, object] = {} if lora is None else {name: str(getattr(lora, name)) for name in names}
    return applied | {"tower": bool(lora and lora.enable_tower_connector_lora)}


def adapters_change_at_runtime() -> bool:
    """Whether a server's clients may load other weights behind an adapter's name and id (`entrypoints/serve/lora`)."""
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def is_from_modelscope() -> bool:
    """Whether vLLM takes models by name from ModelScope (`envs`)."""
    from vllm import envs

    return bool(envs.VLLM_USE_MODELSCOPE)


def adapters_leak(vllm_config: Any) -> bool:
    """Whether a base-model request computes with an adapter when a step has both. `lora/ops/torch_ops` takes index -1, no adapter, for the
    last adapter (vllm-project/vllm#48421); the Triton kernels skip such rows. Unread kernels count as the former."""
    from vllm.platforms import current_platform

    return vllm_config.lora_config is not None and not current_platform.get_punica_wrapper().endswith(
        "PunicaWrapperGPU"
    )


def without_adapters(model: Any) -> Any:
    """The model with the layers below its LoRA wrappers (`lora/layers`); itself if it has none. A wrapper adds the adapters of vLLM's next
    step, whose rows are not the blend's. Weights and everything unwrapped are shared with the model."""
    from vllm.lora.layers import BaseLayerWithLoRA

    if isinstance(model, BaseLayerWithLoRA):
        return model.base_layer
    parts = {name: without_adapters(part) for name, part in model._modules.items() if part is not None}
    if all(part is model._modules[name] for name, part in parts.items()):
        return model
    # Shallow: the served model keeps its wrappers, and no weight is copied.
    bare = copy.copy(model)
    bare._modules = model._modules | parts
    return bare


@contextmanager
def watched(layer: Any, update: Callable[..., None], attend: Callable[..., Any]) -> Generator[None]:
    """Let a layer's attention call these in place of its own methods, which are their first argument (`v1/attention/backend.py`). The
    layer's own are restored afterwards, whatever happens.

    update  writes K and V: `(update, layer, key, value, cache, slots)`
    attend  `(forward, layer, query, ...)`
    """
    impl = layer.impl
    own_update, own_forward = impl.do_kv_cache_update, impl.forward
    impl.do_kv_cache_update = lambda *given: update(own_update, *given)
    impl.forward = lambda *given, **options: attend(own_forward, *given, **options)
    try:
        yield
    finally:
        del impl.do_kv_cache_update, impl.forward  # the class's own are seen again


def attention_of(layer: Any) -> str:
    """Name of a layer's attention implementation."""
    return type(getattr(layer, "impl", layer)).__name__


def is_latent(layer: Any) -> bool:
    """Whether a layer caches a latent row for each token (MLA), in place of K and V (`model_executor/layers/attention/mla_attention.py`)."""
    return hasattr(getattr(layer, "impl", None), "kv_lora_rank")


def decodes_alone_behind(vllm_config: Any) -> bool:
    """Whether nothing but a single token can be computed behind cached ones: MLA on a CPU without AMX, for which vLLM turns chunks and
    prefix caching off (`platforms/cpu.py`)."""
    from vllm.platforms import current_platform

    scheduler = vllm_config.scheduler_config
    return vllm_config.model_config.use_mla and current_platform.is_cpu() and not scheduler.enable_chunked_prefill


def no_forward(runner: Any, model: Any, layers: Mapping[str, Any]) -> str:
    """Why rows cannot be recomputed with this model; empty if they can."""
    for layer in layers.values():
        if layer.attn_backend.forward_includes_kv_cache_update:
            return (
                f"{attention_of(layer)} writes K and V while it attends. Choose another attention backend, or leave blend out"
                " of mode and modes"
            )

    if getattr(runner, "lookback_token_ids", None) is not None:
        return f"{type(model).__name__} looks at tokens before the rows that it computes"
    return ""


def forward_rows(runner: Any, model: Any, layers: Mapping[str, Any], batch: Any) -> None:
    """Runs the model over the rows of a `blend.rows.Batch`, not compiled, with metadata made as the model runner makes it
    (`v1/worker/gpu_model_runner.py`)."""
    import torch
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device, config = runner.device, runner.vllm_config.model_config
    positions, slots = batch.positions.to(device), batch.slots.to(device)
    common = CommonAttentionMetadata(
        query_start_loc=batch.starts.to(device),
        query_start_loc_cpu=batch.starts,
        seq_lens=batch.lengths.to(device),
        seq_lens_cpu_upper_bound=batch.lengths,
        num_reqs=len(batch.lengths),
        num_actual_tokens=len(batch.ids),
        max_query_len=int(batch.starts.diff().max()),
        max_seq_len=int(batch.lengths.max()),
        block_table_tensor=batch.blocks.to(device),
        slot_mapping=slots,
        causal=True,
        is_prefilling=torch.ones(len(batch.lengths), dtype=torch.bool),
        positions=positions,
    )

    metadata: dict[str, Any] = {}
    # Blends are refused with more than one KV cache group.
    for group in runner.attn_groups[0]:
        metadata.update(dict.fromkeys(group.layer_names, group.build_metadata(common)))
    ids: torch.Tensor | None = batch.ids.to(device)
    embeddings: torch.Tensor | None = None
    if config.supports_multimodal_inputs:  # such a model takes embeddings for text as well
        ids, embeddings = None, model.embed_input_ids(ids)
    if config.uses_mrope:  # text alone has the same position in all dimensions
        positions = positions.expand(config.mrope_num_dims, -1)

    context = set_forward_context(
        metadata,
        runner.vllm_config,
        num_tokens=len(batch.ids),
        slot_mapping=dict.fromkeys(layers, slots),
        skip_compiled=True,
    )
    with context:
        model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=embeddings)


def write_rows(layer: Any, cache: "torch.Tensor", keys: "torch.Tensor", values: "torch.Tensor", slots: Any) -> None:
    """Write K (rotated) and V, `[tokens, kv_heads, head_dim]`, to slots of a layer's cache."""
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def scale_and_cap(layer: Any) -> tuple[float, float]:
    """The factor of a layer's scores, and their soft cap (0.0: none)."""
    return layer.impl.scale, getattr(layer.impl, "logits_soft_cap", None) or 0.0


def tokenizer_of(vllm_config: Any) -> Any:
    """The server's tokenizer. Raises: ConfigError if it has none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    if vllm_config.model_config.skip_tokenizer_init:
        raise ConfigError(
            "blend looks for the ends of sentences and needs the tokenizer: run without --skip-tokenizer-init"
        )
    return cached_tokenizer_from_config(vllm_config.model_config)


def rotary_tables(model: Any, layers: Iterable[Any]) -> Iterator[tuple[Any, bool] | None]:
    """Yield each layer's table of cosines and sines `[positions, 2 * half]` for its keys, and whether the partner of a number lies half a
    head apart (else beside it); None without a table."""
    # A layer does not know the module around it, which has the rotary embedding.
    holder = {id(child): module for module in model.modules() for child in module.children()}
    for layer in layers:
        rotary = getattr(holder.get(id(layer)), "rotary_emb", None)
        has_table = hasattr(rotary, "cos_sin_cache") and hasattr(rotary, "is_neox_style")
        yield (rotary.cos_sin_cache, rotary.is_neox_style) if rotary is not None and has_table else None


def connector_of(llm: Any) -> Any:
    """The connector on the scheduler's side of an offline `LLM` in this process (`v1/engine/core_client.py`)."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def has_work(llm: Any) -> bool:
    """Whether an offline `LLM` in this process has requests, or orders of the connector, left (`v1/engine/core_client.py`)."""
    return llm.llm_engine.engine_core.engine_core.scheduler.has_requests()

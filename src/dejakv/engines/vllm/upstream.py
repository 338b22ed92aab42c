# pyright: reportMissingImports=false
"""Every use of what vLLM does not promise, but the forward of blends (`blend/rows.py`), with the versions it was seen to work with.

Adding a version: read the files named below in its source, run `tests/engines/vllm` on it, add it to `SUPPORTED`.
"""

import copy
import dataclasses
import hashlib
import importlib
import inspect
import logging
import secrets
from collections.abc import Callable
from typing import Any

from dejakv.errors import ConfigError

NEEDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "vllm.v1.request",
        "Request",
        (
            "request_id", "status", "prompt_token_ids", "prompt_embeds", "mm_features", "num_prompt_tokens",
            "num_computed_tokens", "num_output_tokens", "sampling_params", "pooling_params", "cache_salt", "lora_request",
            "kv_transfer_params", "skip_reading_prefix_cache", "resumable",
        ),
    ),
    ("vllm.v1.core.sched.scheduler", "Scheduler", ("vllm_config", "_handle_failed_recving")),
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_cached_reqs", "preempted_req_ids"),
    ),
    ("vllm.v1.core.sched.output", "CachedRequestData", ("req_ids", "num_computed_tokens")),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", ("block_pool", "get_block_ids")),
    (
        "vllm.v1.core.block_pool",
        "BlockPool",
        ("num_gpu_blocks", "get_num_free_blocks", "cached_block_hash_to_block"),
    ),
    ("vllm.config", "KVTransferConfig", ("kv_role", "kv_connector_extra_config", "kv_load_failure_policy")),
    ("vllm.v1.outputs", "KVConnectorOutput", ("kv_connector_worker_meta",)),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorTransferResults",
        ("finished_sending", "finished_recving", "failed_recving"),
    ),
)  # fmt: skip
"""Module, class, and attributes of its instances."""


def missing() -> list[str]:
    """What is not there, as `module.Class.name`; empty if `exact` may run."""
    lost: list[str] = []
    for module, name, attributes in NEEDED:
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            lost.append(f"{module}.{name}")
            continue
        lost += [f"{module}.{name}.{each}" for each in attributes if not _has(found, each)]
    return lost


def _has(kind: Any, attribute: str) -> bool:
    """Whether instances have it: of the class, a field, or set by `__init__`."""
    if hasattr(kind, attribute):
        return True
    if dataclasses.is_dataclass(kind):
        return attribute in {field.name for field in dataclasses.fields(kind)}
    makers = (getattr(each.__init__, "__code__", None) for each in kind.__mro__)
    return any(code is not None and attribute in code.co_names for code in makers)


def calling_scheduler() -> Any:
    """The scheduler that is making this connector. A connector that wraps others, such as vLLM's MultiConnector, hands them
    a copy of the configuration, so that nothing else leads to it. Raises ConfigError."""
    from vllm.v1.core.sched.interface import SchedulerInterface

    scheduler = _caller(lambda item: isinstance(item, SchedulerInterface))
    if scheduler is None:
        raise ConfigError("no scheduler makes this connector: it runs in vLLM's engine, alone or in a MultiConnector")
    return scheduler


def calling_model() -> Any:
    """The model of the runner that is calling the worker's connector; None if there is none."""
    runner = _caller(lambda item: hasattr(item, "model_config") and callable(getattr(item, "get_model", None)))
    return None if runner is None else runner.get_model()


def _caller(wanted: Callable[[Any], bool]) -> Any:
    """The nearest object whose method waits for this call to return and that is wanted."""
    frame = inspect.currentframe()
    while frame is not None:
        item = frame.f_locals.get("self")
        if item is not None and wanted(item):
            return item
        frame = frame.f_back
    return None


def recompute_failed_loads(scheduler: Any) -> None:
    """A state that cannot be read must cost a recomputation, never the request (`v1/core/sched/scheduler.py` reads the
    policy right after it made the connector; vLLM's default is to fail the request)."""
    scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"


def fail_loads(scheduler: Any, request_ids: set[str]) -> None:
    """Makes vLLM recompute what is being loaded, or was loaded and not scheduled since, as after a load that failed."""
    scheduler._handle_failed_recving(request_ids)


def leave_room(scheduler: Any, tokens: int) -> None:
    """Keeps so many tokens of the next steps' budget free, but for those that running requests need to go on decoding
    (`v1/core/sched/scheduler.py` reads the attribute at the beginning of each step). A prompt that is not computed in chunks needs the
    whole budget, so that none is kept free there."""
    config = scheduler.scheduler_config
    whole = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    most = whole - config.max_num_seqs if config.enable_chunked_prefill else 0
    scheduler.max_num_scheduled_tokens = whole - max(0, min(tokens, most))


log = logging.getLogger("dejakv.vllm")

SUPPORTED = ("0.32.0",)


def vllm_version() -> str:
    """Version of the installed vLLM without its local part (`0.32.0+cpu` gives `0.32.0`)."""
    import vllm

    return vllm.__version__.split("+")[0]


def require_supported(version: str | None = None) -> None:
    """Raises ConfigError unless the running vLLM is one these connectors were shown to be exact with."""
    version = version or vllm_version()
    if version not in SUPPORTED:
        raise ConfigError(
            f"vLLM {version} is not supported: DejaKV leans on fields that may change between releases."
            f" Install one of: {', '.join(SUPPORTED)}"
        )


def require_usable(*, blend: bool, version: str | None = None) -> None:
    """Lets an untested vLLM run `exact` where it has what that needs. Raises ConfigError, with what is missing, if not."""
    version = version or vllm_version()
    if version in SUPPORTED:
        return
    tested = ", ".join(SUPPORTED)
    if blend:
        raise ConfigError(
            f"blend was not tested with vLLM {version}, and leans on more of it than exact does: leave blend out of mode and"
            f" modes, or install one of: {tested}"
        )
    lost = missing()
    if lost:
        raise ConfigError(f"vLLM {version} is not supported: it has no {', '.join(lost)}. Install one of: {tested}")
    log.warning("vLLM %s was not tested (%s was): it has what exact reuse needs, so that runs", version, tested)


def register(connector: type) -> None:
    """Makes a connector known by its name: MultiConnector looks up the classes of statistics by that alone
    (`v1/multi_connector.py`), and an unknown one ends the server."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)
    except ValueError:
        log.debug("%s is registered already", connector.__name__)


class EncoderResets:
    """Notices that vLLM emptied its encoder cache, as it does when weights are updated (vllm-project/vllm#33452). It tells
    connectors nothing of it, so a mark lies in the cache, under a name that no medium has, and is gone after a reset
    (`v1/core/encoder_cache_manager.py`)."""

    MARK = "dejakv:mark"

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._placed = False

    def seen(self) -> bool:
        """Whether there was one since the last call."""
        cached = self._scheduler.encoder_cache_manager.cached  # the manager is made after the connector
        gone = self._placed and self.MARK not in cached
        cached[self.MARK] = set()
        self._placed = True
        return gone


def was_aborted(request: Any) -> bool:
    """Whether a finished request was ended from outside. A pause ends all and resets the prefix cache at once, so that none of
    their blocks may be held for a copy (`v1/engine/core.py`)."""
    from vllm.v1.request import RequestStatus

    return request.status == RequestStatus.FINISHED_ABORTED


def prefix_cache_is_empty(kv_cache_manager: Any) -> bool:
    """Whether vLLM's own reset has taken place: it does nothing while blocks are in use (`v1/core/block_pool.py`), beside the
    null block."""
    pool = kv_cache_manager.block_pool
    return pool.num_gpu_blocks - pool.get_num_free_blocks() <= 1 and not len(pool.cached_block_hash_to_block)


def hash_block_tokens(kv_cache_config: Any) -> int:
    """Tokens behind one entry of `Request.block_hashes`; it may be fewer than a KV block's."""
    return kv_cache_config.hash_block_size or block_tokens(kv_cache_config)


def block_tokens(kv_cache_config: Any) -> int:
    """Tokens in one KV block."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def bytes_per_token(kv_cache_config: Any) -> int:
    """Bytes of KV for one token in all layers, on one rank."""
    group = kv_cache_config.kv_cache_groups[0]
    return len(group.layer_names) * group.kv_cache_spec.page_size_bytes // group.kv_cache_spec.block_size


def attention_layers(vllm_config: Any, names: Any) -> dict[str, Any]:
    """The attention modules behind the registered KV caches, in the model's order."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: context[name] for name in names}


def rekey_tail(request: Any, first: int, upto: int | None = None) -> bool:
    """Makes a request's blocks from hash block `first` on private to it; False if there is no such block.

    `KVCacheManager.allocate_slots` ends in `cache_blocks`, which files every full block under `Request.block_hashes`:
    approximate state would be served to later exact requests. A hash that nobody can compute again keeps it private, and
    since every later hash chains from the last one, the blocks of generated tokens become private too. Blocks before
    `first` keep their exact hashes and stay shared.

    upto  do not touch hashes from here on: they are private already (a retry with fewer local blocks)
    """
    hashes = request.block_hashes
    if first >= len(hashes):
        return False
    for index in range(first, len(hashes) if upto is None else upto):
        hashes[index] = _private(hashes[index])
    return True


def _private(block_hash: Any) -> bytes:
    """A hash in this one's place that nobody can compute again."""
    return hashlib.sha256(secrets.token_bytes(16) + bytes(block_hash)).digest()


def device_name() -> str:
    """The kind of device that computes: `cpu`, `NVIDIA H200` (`platforms`)."""
    from vllm.platforms import current_platform

    return f"{current_platform.device_type}:{current_platform.get_device_name()}"


def attention_backend(vllm_config: Any) -> str:
    """The attention backend that vLLM selects for this model, and how it is configured. The layers themselves are in the worker, which may
    be another process (`v1/attention/selector.py`)."""
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
    """Whether a token's state has the same bits whatever is computed beside it (`model_executor/determinism`); CUDA's kernels alone have
    such a mode."""
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
    """What decides, beside its files, what a LoRA adapter does to the model (`config/lora.py`)."""
    lora = vllm_config.lora_config
    names = ("lora_dtype", "target_modules", "enable_moe_shared_loras", "enable_mixed_moe_lora_format")
    applied: dict[str, object] = {} if lora is None else {name: str(getattr(lora, name)) for name in names}
    return applied | {"tower": bool(lora and lora.enable_tower_connector_lora)}


def adapters_change_at_runtime() -> bool:
    """Whether a server's clients may load other weights behind an adapter's name and id (`entrypoints/serve/lora`)."""
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def adapters_leak(vllm_config: Any) -> bool:
    """Whether a base-model request computes with an adapter when a step has both.

    `lora/ops/torch_ops` takes index -1, no adapter, for the last adapter (vllm-project/vllm#48421); the Triton kernels skip
    such rows. Kernels that were not read count as the former.
    """
    from vllm.platforms import current_platform

    return vllm_config.lora_config is not None and not current_platform.get_punica_wrapper().endswith(
        "PunicaWrapperGPU"
    )


def without_adapters(model: Any) -> Any:
    """The model with its layers as they are below their LoRA wrappers (`lora/layers`); the model itself if it has none.

    A wrapper adds the adapters of the rows of the step that vLLM is about to run, which are not the rows that a blend
    computes. Weights and everything that is not wrapped are shared with the model.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    if isinstance(model, BaseLayerWithLoRA):
        return model.base_layer
    parts = {name: without_adapters(part) for name, part in model._modules.items() if part is not None}
    if all(part is model._modules[name] for name, part in parts.items()):
        return model
    bare = copy.copy(model)
    bare._modules = model._modules | parts
    return bare

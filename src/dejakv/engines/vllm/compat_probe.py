"""What `exact` needs of a vLLM that was not tested: looked for by name, at the start.

Names say nothing of meaning. What a wrong meaning could spoil is checked elsewhere: the layout of KV by a write-read round trip, and
stored state by the epoch, which has vLLM's version in it, so that no other version finds it. Blend re-keys blocks and runs the
model, and is for tested versions alone.
"""

import dataclasses
import importlib
from typing import Any

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

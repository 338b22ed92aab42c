# pyright: reportMissingImports=false
"""The one place to touch for a new vLLM release: supported versions, and every use of what vLLM does not promise.

Adding a version: read the files named below in its source, run `tests/engines/vllm` on it, add it to `SUPPORTED`.
"""

import hashlib
import secrets
from typing import Any

from dejakv.errors import ConfigError

SUPPORTED = ("0.32.0",)


def vllm_version() -> str:
    """The running vLLM's version without a local part (`0.32.0+cpu` is `0.32.0`)."""
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


def recompute_failed_loads(vllm_config: Any) -> None:
    """A state that cannot be read must cost a recomputation, never the request (`v1/core/sched/scheduler.py` reads the
    policy right after it made the connector; vLLM's default is to fail the request)."""
    vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"


def hash_block_tokens(kv_cache_config: Any) -> int:
    """Tokens behind one entry of `Request.block_hashes`; it may be fewer than a KV block's."""
    return kv_cache_config.hash_block_size or block_tokens(kv_cache_config)


def block_tokens(kv_cache_config: Any) -> int:
    """Tokens in one KV block."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


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
        old = bytes(hashes[index])
        hashes[index] = hashlib.sha256(secrets.token_bytes(16) + old).digest()
    return True


def render(llm: Any, prompt: Any) -> Any:
    """A prompt as vLLM's engine takes it: token ids with media expanded (`entrypoints/common/offline.py`)."""
    return llm._preprocess_cmpl_one(prompt)


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def require_free_process() -> None:
    """vLLM keeps connectors in globals, so a process runs one engine with connectors at a time. Raises ConfigError."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    if has_kv_transfer_group():
        raise ConfigError("another vLLM engine runs in this process: close it first")


def close(llm: Any) -> None:
    """Ends an offline engine, its connectors, and what vLLM keeps of them in globals."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()

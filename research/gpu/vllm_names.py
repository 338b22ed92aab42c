"""The few names of vLLM that the worker side imports, where vLLM is not installed.

With them the worker side runs as it is, around a small model of `tests/gpu`: base classes of two
messages, and the context and the metadata of a forward, as plain values.
"""

import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

_context: list[SimpleNamespace] = []


class KVConnectorMetadata:
    """Base of the scheduler's message."""


class KVConnectorWorkerMetadata:
    """Base of the worker's message."""


class CommonAttentionMetadata(SimpleNamespace):
    """Metadata of a forward."""


@contextmanager
def set_forward_context(
    attn_metadata: Any, _config: Any, *, slot_mapping: Any, **_: Any
) -> Generator[None]:
    """Make this the context of forwards."""
    _context.append(SimpleNamespace(attn_metadata=attn_metadata, slot_mapping=slot_mapping))
    try:
        yield
    finally:
        _context.pop()


def get_forward_context() -> SimpleNamespace:
    """Return the context of the forward under way."""
    return _context[-1]


_NAMES: dict[str, tuple[Any, ...]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    ),
    "vllm.forward_context": (set_forward_context, get_forward_context),
    "vllm.v1.attention.backend": (CommonAttentionMetadata,),
}


def provide() -> bool:
    """Put the names into place if vLLM is not installed; return whether they are."""
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is not None:
        return False
    for name, members in _NAMES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for member in members:
            setattr(sys.modules[name], member.__name__, member)
    return True


def engine_config() -> Any:
    """Return the part of vLLM's configuration that forwards of rows read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(supports_multimodal_inputs=False, uses_mrope=False),
        scheduler_config=SimpleNamespace(max_num_seqs=1024),
    )

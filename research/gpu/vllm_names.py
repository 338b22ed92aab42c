"""The few names of vLLM that the worker side imports, in a process without vLLM.

With them the worker side runs as it is, around a small model of `tests/gpu`: base classes of two
messages, and the context and the metadata of a forward, as plain values. An installed vLLM wants a
whole configuration for those, and runs in processes of its own (`with_vllm`).
"""

import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

INSTALLED = importlib.util.find_spec("vllm") is not None
"""Whether vLLM itself is installed. Read before any name is put into place."""

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


def provide() -> None:
    """Put the names into place, unless vLLM itself was imported."""
    if getattr(sys.modules.get("vllm"), "__file__", None):
        return
    for name, members in _NAMES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for member in members:
            setattr(sys.modules[name], member.__name__, member)


def engine_config() -> Any:
    """Return the part of vLLM's configuration that forwards of rows read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(supports_multimodal_inputs=False, uses_mrope=False),
        scheduler_config=SimpleNamespace(max_num_seqs=1024),
    )

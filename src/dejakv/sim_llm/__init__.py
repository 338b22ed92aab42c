"""Sim-LLM: a task takes the top layer's KV of a similar earlier task, in models for which that is sound (docs/sim-llm.md).

Importing the package loads no torch; names resolve on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejakv.sim_llm.inference import SimLLMInference as SimLLMInference
    from dejakv.sim_llm.model import LlamaForCausalLMWithKVReuse as LlamaForCausalLMWithKVReuse
    from dejakv.sim_llm.tasks import InterTaskKVManager as InterTaskKVManager
    from dejakv.sim_llm.tasks import TaskCacheEntry as TaskCacheEntry
    from dejakv.vectors.lsh import LSHIndex as LSHIndex

_HOMES = {
    "InterTaskKVManager": "tasks",
    "LSHIndex": "dejakv.vectors.lsh",
    "LlamaForCausalLMWithKVReuse": "model",
    "SimLLMInference": "inference",
    "TaskCacheEntry": "tasks",
}

__all__ = [
    "InterTaskKVManager",
    "LSHIndex",
    "LlamaForCausalLMWithKVReuse",
    "SimLLMInference",
    "TaskCacheEntry",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    return getattr(import_module(home if home.startswith("dejakv.") else f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

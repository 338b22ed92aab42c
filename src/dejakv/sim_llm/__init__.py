"""Sim-LLM: a task takes the top layer's KV of a similar earlier task, in models for which that is sound (docs/prototypes/sim-llm.md)."""

from dejakv.sim_llm.inference import SimLLMInference
from dejakv.sim_llm.model import LlamaForCausalLMWithKVReuse, LlamaModelWithKVReuse
from dejakv.sim_llm.tasks import InterTaskKVManager, TaskCacheEntry
from dejakv.vectors.lsh import LSHIndex

__all__ = [
    "InterTaskKVManager",
    "LSHIndex",
    "LlamaForCausalLMWithKVReuse",
    "LlamaModelWithKVReuse",
    "SimLLMInference",
    "TaskCacheEntry",
]

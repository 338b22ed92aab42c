"""Sim-LLM: a task takes the top layer's KV of a similar earlier task.

That is sound in layer-condensed models alone (docs/prototypes/sim-llm.md).
"""

from dejakv.prototypes.lsh import LSHIndex
from dejakv.prototypes.sim_llm.inference import SimLLMInference
from dejakv.prototypes.sim_llm.model import LlamaForCausalLMWithKVReuse, LlamaModelWithKVReuse
from dejakv.prototypes.sim_llm.tasks import InterTaskKVManager, TaskCacheEntry

__all__ = [
    "InterTaskKVManager",
    "LSHIndex",
    "LlamaForCausalLMWithKVReuse",
    "LlamaModelWithKVReuse",
    "SimLLMInference",
    "TaskCacheEntry",
]

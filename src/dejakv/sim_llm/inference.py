"""Text in, text out: a model, its cache of tasks, and what both did."""

import threading
import time
from typing import Any

from dejakv.sim_llm.model import LlamaForCausalLMWithKVReuse, TaskResult
from dejakv.sim_llm.tasks import InterTaskKVManager

_TOTALS = ("prompts", "prompt_tokens", "computed_tokens", "new_tokens", "seconds")


class TaskAnswer(str):
    """The answer, with how it came about in `result`."""

    result: TaskResult

    @classmethod
    def of(cls, text: str, result: TaskResult) -> "TaskAnswer":
        answer = cls(text)
        answer.result = result
        return answer

    @property
    def reused(self) -> bool:
        return self.result.donor is not None


class SimLLMInference:
    """Answers prompts, one at a time, from the KV entries of similar earlier tasks."""

    def __init__(
        self,
        model: LlamaForCausalLMWithKVReuse,
        max_cache_size: int = 100,
        similarity_threshold: float = 0.8,
        num_hyperplanes: int = 16,
        **options: Any,
    ) -> None:
        self.model = model
        self.manager: InterTaskKVManager = model.make_manager(
            max_cache_size, similarity_threshold, num_hyperplanes=num_hyperplanes, **options
        )
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(_TOTALS, 0)

    @classmethod
    def from_pretrained(
        cls,
        model_path: str,
        max_cache_size: int = 100,
        similarity_threshold: float = 0.8,
        num_hyperplanes: int = 16,
        device: str = "auto",
        **model_kwargs: Any,
    ) -> "SimLLMInference":
        """`model_kwargs`: matching, tail (see `LlamaForCausalLMWithKVReuse`); store, partition,
        seed (see `InterTaskKVManager`); all others go to transformers.

        Raises: ModelError for a model that is missing, or ordinary; ConfigError for a setting out of range
        """
        option_names = ("store", "partition", "seed")
        manager_options = {name: model_kwargs.pop(name) for name in option_names if name in model_kwargs}
        model = LlamaForCausalLMWithKVReuse.from_pretrained(model_path, device=device, **model_kwargs)
        return cls(model, max_cache_size, similarity_threshold, num_hyperplanes, **manager_options)

    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_p: float = 1.0,
        do_sample: bool = False,
        task_id: str | None = None,
        enable_kv_reuse: bool = True,
        **generate_kwargs: Any,
    ) -> TaskAnswer:
        """Answer a prompt with the KV entries of similar earlier tasks, and keep its own. Greedy unless `do_sample`. Calls run one at a
        time.

        task_id          name under which the task is kept; None: a digest of the prompt
        enable_kv_reuse  False: compute the whole prompt
        generate_kwargs  passed to `generate`
        """
        sampling = {"temperature": temperature, "top_p": top_p, "do_sample": do_sample}
        options = {"max_new_tokens": max_new_tokens, **sampling, **generate_kwargs}
        ids = tuple(self.model.tokenizer(prompt)["input_ids"])

        with self._lock:
            began = time.perf_counter()
            result = self.model.run(ids, task_id, enable_kv_reuse=enable_kv_reuse, **options)
            # In the order of `_TOTALS`.
            increments = (1, result.prompt_tokens, result.computed, len(result.tokens), time.perf_counter() - began)
            self._totals = {name: self._totals[name] + value for name, value in zip(_TOTALS, increments, strict=True)}
        return TaskAnswer.of(self.model.tokenizer.decode(result.tokens, skip_special_tokens=True).strip(), result)

    def batch_generate(
        self, prompts: list[str], max_new_tokens: int = 100, enable_kv_reuse: bool = True, **generate_kwargs: Any
    ) -> list[TaskAnswer]:
        """Answers in order, one after the other: a prompt may take the state of the prompts before it."""
        options = {"max_new_tokens": max_new_tokens, "enable_kv_reuse": enable_kv_reuse, **generate_kwargs}
        return [self.generate(prompt, **options) for prompt in prompts]

    def get_statistics(self) -> dict[str, Any]:
        """The cache's statistics, and prompts, prompt_tokens, computed_tokens (prompt rows through the condensed layers),
        new_tokens and seconds so far."""
        return {**self.manager.get_statistics(), **self._totals}

    def reset_cache(self) -> None:
        """Forgets all tasks, and the counters."""
        with self._lock:
            self.manager.reset()
            self._totals = dict.fromkeys(self._totals, 0)

    def set_similarity_threshold(self, threshold: float) -> None:
        """Set the least cosine of a donor. Raises: ConfigError outside of [-1, 1]."""
        self.manager.similarity_threshold = threshold

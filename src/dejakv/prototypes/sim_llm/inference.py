"""SimLLM's text interface: answers that reuse KV entries of similar earlier tasks, and totals."""

import threading
import time
from typing import Any

from dejakv.prototypes.sim_llm.model import LlamaForCausalLMWithKVReuse, TaskResult
from dejakv.prototypes.sim_llm.tasks import InterTaskKVManager

_TOTALS = ("prompts", "prompt_tokens", "computed_tokens", "new_tokens", "seconds")


class TaskAnswer(str):
    """Text of an answer, with how it came about in `result`."""

    result: TaskResult

    @classmethod
    def of(cls, text: str, result: TaskResult) -> "TaskAnswer":
        """Make an answer of its text and result."""
        answer = cls(text)
        answer.result = result
        return answer

    @property
    def reused(self) -> bool:
        """Whether another task's state was used."""
        return self.result.donor is not None


class SimLLMInference:
    """Answers to prompts, one at a time, from the KV entries of similar earlier tasks.

    Parameters
    ----------
    model : LlamaForCausalLMWithKVReuse
        The model.
    max_cache_size : int
        Maximum number of tasks.
    similarity_threshold : float
        Least cosine of a donor.
    num_hyperplanes : int
        Characters of a task's hash.
    options : Any
        Further options of `InterTaskKVManager`.
    """

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
        """Load a model and make its cache of tasks.

        Parameters
        ----------
        model_path : str
            A bundled name, a folder or a hub id.
        max_cache_size : int
            Maximum number of tasks.
        similarity_threshold : float
            Least cosine of a donor.
        num_hyperplanes : int
            Characters of a task's hash.
        device : str
            Torch device; `auto`: CUDA where there is one.
        model_kwargs : Any
            matching, tail (see `LlamaForCausalLMWithKVReuse`); store, partition, seed (see
            `InterTaskKVManager`); all others go to transformers.

        Raises
        ------
        ModelError
            For a model that is missing, or ordinary.
        ConfigError
            For a setting out of range.
        """
        # These are the cache's; all others go to the model.
        option_names = ("store", "partition", "seed")
        manager_options = {
            name: model_kwargs.pop(name) for name in option_names if name in model_kwargs
        }
        model = LlamaForCausalLMWithKVReuse.from_pretrained(
            model_path, device=device, **model_kwargs
        )
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
        """Answer a prompt with the KV entries of similar earlier tasks, and keep its own.

        Greedy unless `do_sample`. Calls run one at a time.

        Parameters
        ----------
        prompt : str
            The prompt.
        max_new_tokens : int
            Maximum tokens of the answer.
        temperature, top_p, do_sample : Any
            Sampling, as of transformers.
        task_id : str, optional
            Name under which the task is kept; None: a digest of the prompt.
        enable_kv_reuse : bool
            False: compute the whole prompt.
        generate_kwargs : Any
            Passed to `generate` of the model.

        Returns
        -------
        TaskAnswer
            The text, stripped, with its `TaskResult`.
        """
        sampling = {"temperature": temperature, "top_p": top_p, "do_sample": do_sample}
        options = {"max_new_tokens": max_new_tokens, **sampling, **generate_kwargs}
        ids = tuple(self.model.tokenizer(prompt)["input_ids"])

        # A task must be kept before the next prompt looks for it, and the totals fit together.
        with self._lock:
            began = time.perf_counter()
            result = self.model.run(ids, task_id, enable_kv_reuse=enable_kv_reuse, **options)
            # In the order of `_TOTALS`.
            increments = (
                1,
                result.prompt_tokens,
                result.computed,
                len(result.tokens),
                time.perf_counter() - began,
            )
            self._totals = {
                name: self._totals[name] + value
                for name, value in zip(_TOTALS, increments, strict=True)
            }

        return TaskAnswer.of(
            self.model.tokenizer.decode(result.tokens, skip_special_tokens=True).strip(), result
        )

    def batch_generate(
        self,
        prompts: list[str],
        max_new_tokens: int = 100,
        enable_kv_reuse: bool = True,
        **generate_kwargs: Any,
    ) -> list[TaskAnswer]:
        """Answer prompts in order, one after the other.

        A prompt may take the state of the prompts before it.
        """
        options = {
            "max_new_tokens": max_new_tokens,
            "enable_kv_reuse": enable_kv_reuse,
            **generate_kwargs,
        }
        return [self.generate(prompt, **options) for prompt in prompts]

    def get_statistics(self) -> dict[str, Any]:
        """Return the cache's statistics and the totals so far.

        The totals are prompts, prompt_tokens, computed_tokens (prompt rows through the condensed
        layers), new_tokens and seconds.
        """
        return {**self.manager.get_statistics(), **self._totals}

    def reset_cache(self) -> None:
        """Forget all tasks, and the counters."""
        with self._lock:
            self.manager.reset()
            self._totals = dict.fromkeys(self._totals, 0)

    def set_similarity_threshold(self, threshold: float) -> None:
        """Set the least cosine of a donor.

        Raises
        ------
        ConfigError
            Outside of [-1, 1].
        """
        self.manager.similarity_threshold = threshold

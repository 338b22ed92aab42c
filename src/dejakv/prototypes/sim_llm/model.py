"""Models that take the top layer's KV of similar tasks from an `InterTaskKVManager`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from dejakv.blend.sentences import sentence_ends
from dejakv.blend.token_map import DonorTokens, Ids
from dejakv.engines.transformers.fingerprint.watch import ModelWatch
from dejakv.errors import ConfigError, InputError, ModelError
from dejakv.models import load
from dejakv.models.cache_name import CACHE_NAME
from dejakv.prototypes.lckv.cache import GivenRows, LCKVCache, cached_kv
from dejakv.prototypes.lckv.layout import layout_of
from dejakv.prototypes.sim_llm.tasks import InterTaskKVManager, TaskCacheEntry
from dejakv.prototypes.top_layer.prefill import moved_rows
from dejakv.prototypes.top_layer.rows import (
    MATCHINGS,
    TOP_LAYER_TAIL,
    UNSOUND,
    computed_rows,
    take_rows,
)
from dejakv.vectors.base import normalized

_REUSE_OPTIONS = ("matching", "tail")


@dataclass(frozen=True)
class TaskResult:
    """Answer to one task.

    Attributes
    ----------
    tokens : tuple[int, ...]
        The answer's token ids, up to and with the end token.
    donor : str or None
        Task whose state was used; None on a miss.
    similarity : float
        Cosine with the donor; 0 on a miss.
    prompt_tokens : int
        Tokens of the prompt.
    computed : int
        Prompt rows through the condensed layers.
    """

    tokens: tuple[int, ...]
    donor: str | None
    similarity: float
    prompt_tokens: int
    computed: int


class LlamaModelWithKVReuse:
    """Layer-condensed model without its head, which computes a prompt with a similar task's state.

    Parameters
    ----------
    model : Any
        The model. An ordinary one is refused, because there this is unsound.
    tokenizer : Any
        Its tokenizer.
    matching, tail
        See `blend.top_layer.take_rows`.

    Raises
    ------
    ModelError
        For an ordinary model.
    ConfigError
        For an unknown matching, or a tail below 1.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, matching: str = "map", tail: int = TOP_LAYER_TAIL
    ) -> None:
        layout = layout_of(model)
        if layout is None:
            raise ModelError(
                f"{type(model).__name__} cannot take the top layer's KV of a similar task: "
                f"{UNSOUND}. Use a layer-condensed model "
                "(docs-lckv is bundled), or blend for this one"
            )

        if matching not in MATCHINGS:
            raise ConfigError(
                f"matching={matching!r} is unknown: choose one of {', '.join(MATCHINGS)}"
            )

        if tail < 1:
            raise ConfigError(f"tail={tail} leaves no row to continue from: give at least 1")
        self.model, self.tokenizer, self.layout = model.eval(), tokenizer, layout
        self.matching, self.tail = matching, tail
        self._ends = sentence_ends(tokenizer)
        # Weights may change in place, and older tasks' state must then not be found.
        self._watch = ModelWatch(model, tokenizer, None)
        self.manager: InterTaskKVManager | None = None

    @classmethod
    def from_pretrained(cls, model_path: str, *, device: str = "auto", **options: Any) -> Self:
        """Load a bundled name, a folder or a hub id.

        `matching` and `tail` are as in the class; other options go to transformers.

        Raises
        ------
        ModelError
            For a model that is missing, or ordinary.
        """
        reuse_options = {name: options.pop(name) for name in _REUSE_OPTIONS if name in options}
        model, tokenizer = load(model_path, **options)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device), tokenizer, **reuse_options)

    def __getattr__(self, name: str) -> Any:
        """Look up missing attributes in the model: `config`, `device`, `dtype`, ..."""
        # Before `__init__` (in a copy, from a pickle) `model` would look for itself for ever.
        if name == "model" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model, name)

    def to(self, *args: Any, **options: Any) -> Self:
        """Move or convert the model in place."""
        self.model.to(*args, **options)
        return self

    def cuda(self, device: Any = None) -> Self:
        """Move the model to a GPU and return it. Raises torch's error without a GPU."""
        self.model.cuda(device)
        return self

    def cpu(self) -> Self:
        """Move the model to the CPU."""
        return self.to("cpu")

    @property
    def epoch(self) -> str:
        """Fingerprint of the weights, tokenizer and numerics, renewed when they change.

        It is empty if the model cannot be described.
        """
        self._watch.check()
        return self._watch.epoch

    def make_manager(
        self, max_cache_size: int = 100, similarity_threshold: float = 0.8, **options: Any
    ) -> Any:
        """Make a cache of tasks that fits this model, and connect it.

        `options` are those of `InterTaskKVManager`.
        """
        # Any token tells the size.
        size, device = len(self.embed([0])), str(self.model.device)
        self.set_kv_manager(
            InterTaskKVManager(
                size,
                max_cache_size,
                similarity_threshold,
                device=device,
                epoch=self.epoch,
                **options,
            )
        )
        return self.manager

    def set_kv_manager(self, kv_manager: InterTaskKVManager | None) -> None:
        """Connect a cache of tasks; None disconnects it.

        Raises
        ------
        ConfigError
            If the cache is of another dimension.
        """
        size = len(self.embed([0]))
        if kv_manager is not None and kv_manager.embedding_dim != size:
            raise ConfigError(
                f"the cache of tasks is for embeddings of {kv_manager.embedding_dim}, this "
                f"model's have {size}: "
                f"make it with embedding_dim={size}"
            )

        self.manager = kv_manager

    def embed_tokens(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return input embeddings, [tokens, hidden] float32."""
        ids = torch.tensor(list(token_ids), device=self.model.device)
        with torch.no_grad():
            return self.model.get_input_embeddings()(ids).float().cpu().numpy()

    def embed(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return a task's embedding: the mean of its input embeddings, [hidden] of length 1."""
        return normalized(self.embed_tokens(token_ids).mean(0))

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call `forward`."""
        return self.forward(*args, **options)

    @torch.no_grad()
    def forward(self, input_ids: Any, task_id: str | None = None) -> BaseModelOutputWithPast:
        """Compute one task's prompt with a similar task's state, or in full, and then keep its own.

        Parameters
        ----------
        input_ids : tensor or list
            Token ids `[1, tokens]`.
        task_id : str, optional
            Name under which the task is kept; by default a digest of its text.

        Returns
        -------
        BaseModelOutputWithPast
            `last_hidden_state` `[1, rows, hidden]` of the computed rows, the last one last, and the
            cache of the whole prompt.

        Raises
        ------
        InputError
            For an empty prompt, one beyond the model's context, or more than one task.
        """
        prompt = self._prompt(input_ids)
        self._check(len(prompt), 0)
        tasks = self._tasks()
        entry = self._search(tasks, prompt) if tasks is not None else None

        cache = LCKVCache(
            self.layout, self._rows_of_donor(prompt, entry) if entry is not None else None
        )
        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.model(input_ids=ids, use_cache=True, **{CACHE_NAME: cache})
        # State that stands on another task's is no donor.
        if tasks is not None and entry is None:
            self._keep(tasks, prompt, cache, task_id)
        return out

    @staticmethod
    def _prompt(input_ids: Any) -> tuple[int, ...]:
        ids = torch.as_tensor(input_ids)
        if ids.dim() != 2 or ids.shape[0] != 1:
            raise InputError(f"input_ids of shape {tuple(ids.shape)}: give one task [1, tokens]")
        return tuple(ids[0].tolist())

    def _tasks(self) -> InterTaskKVManager | None:
        """Return the cache of tasks for the model as it is now.

        None stands for a model without a cache, and for one that cannot be described.
        """
        epoch = self.epoch
        if self.manager is None or not epoch:
            return None
        self.manager.epoch = epoch
        return self.manager

    def _keep(
        self,
        tasks: InterTaskKVManager,
        prompt: tuple[int, ...],
        cache: LCKVCache,
        task_id: str | None,
    ) -> None:
        """Keep a computed prompt's top-layer state."""
        text = self.tokenizer.decode(prompt)
        # Bottom layers are left out: every prompt computes them for all of its rows.
        layers = [cached_kv(cache, layer) for layer in self.layout.task_layers]
        state = [
            torch.stack([kv[part][0, :, : len(prompt)] for kv in layers if kv is not None])
            for part in (0, 1)
        ]
        name = task_id or tasks.generate_task_id(text)
        tasks.add_task(name, self.embed(prompt), state, token_ids=prompt, text=text)

    def _search(self, manager: InterTaskKVManager, ids: tuple[int, ...]) -> TaskCacheEntry | None:
        def useful(donor: Sequence[int]) -> bool:
            """Tell whether any row of a donor would be taken."""
            return not donor or len(computed_rows(self._rows(ids, donor))) < len(ids)

        return manager.search_similar_task(self.embed(ids), useful)

    def _rows(self, ids: tuple[int, ...], donor: Sequence[int]) -> Ids:
        return take_rows(
            ids,
            DonorTokens.of(donor),
            self.matching,
            self.embed_tokens,
            tail=self.tail,
            ends=self._ends,
        )

    def _rows_of_donor(self, ids: tuple[int, ...], entry: TaskCacheEntry) -> GivenRows:
        """Return a task's rows in the prompt's order, keys rotated to their positions.

        Raises ModelError if the rows are of another model.
        """
        device, config = self.model.device, self.model.config
        state = torch.stack([part.to(device) for part in entry.top_layer_kv])
        # Tasks can be added by hand (`add_task`), with the state of any model.
        want = (len(self.layout.task_layers), config.num_key_value_heads, config.head_dim)
        got = (state.shape[1], state.shape[2], state.shape[4])
        if want != got or state.dtype != self.model.dtype:
            raise ModelError(
                f"the task's state is of another model: (layers, heads, dim) {got} in "
                f"{state.dtype}, this model has {want} "
                f"in {self.model.dtype}: keep one cache of tasks for each model (`epoch`)"
            )

        plan = self._rows(ids, entry.token_ids)
        moved = moved_rows(self.model, state, plan, np.arange(state.shape[3]))
        layers = zip(self.layout.task_layers, moved, strict=True)
        rows = torch.from_numpy(computed_rows(plan))[None].to(device)
        return GivenRows(
            {layer: (keys[None], values[None]) for layer, (keys, values) in layers}, rows
        )

    def _check(self, tokens: int, max_new_tokens: int) -> None:
        limit = self.model.config.max_position_embeddings
        if not tokens:
            raise InputError("the prompt has no tokens: give a question")
        if tokens + max_new_tokens > limit:
            raise InputError(
                f"a prompt of {tokens} tokens with up to {max_new_tokens} for the answer is "
                "longer than the model's context of "
                f"{limit}: shorten the prompt, or give a smaller max_new_tokens"
            )


class LlamaForCausalLMWithKVReuse(LlamaModelWithKVReuse):
    """Layer-condensed model with its head: logits, and answers."""

    def forward(self, input_ids: Any, task_id: str | None = None) -> CausalLMOutputWithPast:
        """Compute as `LlamaModelWithKVReuse.forward` does, and return logits of the computed rows.

        The logits are `[1, rows, vocabulary]`.
        """
        out = super().forward(input_ids, task_id)
        with torch.no_grad():
            logits = self.model.lm_head(out.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, **{CACHE_NAME: out.get(CACHE_NAME)})

    def generate_with_kv_reuse(
        self, input_ids: Any, task_id: str | None = None, **options: Any
    ) -> torch.Tensor:
        """Answer one task of [1, tokens] ids; return [1, prompt + answer] ids, as `generate` does.

        Raises
        ------
        InputError
            For another shape.
        """
        prompt = self._prompt(input_ids)
        answer = self.run(prompt, task_id, **options).tokens
        return torch.tensor([[*prompt, *answer]], device=getattr(input_ids, "device", None))

    @torch.no_grad()
    def run(
        self,
        prompt: tuple[int, ...],
        task_id: str | None = None,
        *,
        enable_kv_reuse: bool = True,
        max_new_tokens: int = 100,
        **options: Any,
    ) -> TaskResult:
        """Answer a prompt from a similar task's state, or compute it and keep its own.

        Parameters
        ----------
        prompt : tuple[int, ...]
            Token ids.
        task_id : str, optional
            Name under which the task is kept; by default a digest of its text.
        enable_kv_reuse : bool
            False: compute the whole prompt, and keep nothing.
        max_new_tokens : int
            Maximum tokens of the answer.
        options : Any
            Options of `generate` (temperature, top_p, do_sample, ...).

        Raises
        ------
        InputError
            For an empty or over-long prompt.
        ConfigError
            For `max_new_tokens` below 1.
        ModelError
            For a task of another model.
        """
        if max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens={max_new_tokens} leaves no room for an answer: give at least 1"
            )

        self._check(len(prompt), max_new_tokens)

        tasks = self._tasks() if enable_kv_reuse else None
        entry = self._search(tasks, prompt) if tasks is not None else None
        result, cache = self._generate(prompt, entry, max_new_tokens, options)
        # State that stands on another task's is no donor.
        if tasks is not None and entry is None:
            self._keep(tasks, prompt, cache, task_id)
        return result

    def _generate(
        self,
        ids: tuple[int, ...],
        entry: TaskCacheEntry | None,
        max_new_tokens: int,
        options: dict[str, Any],
    ) -> tuple[TaskResult, LCKVCache]:
        """Return the answer, and the cache after it."""
        donor_rows = self._rows_of_donor(ids, entry) if entry is not None else None
        # transformers warns of sampling settings in greedy search.
        if not options.get("do_sample"):
            options = {
                name: value
                for name, value in options.items()
                if name not in ("temperature", "top_p", "top_k")
            }

        pad = self.tokenizer.pad_token_id
        prompt = torch.tensor([ids], device=self.model.device)
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            **{CACHE_NAME: LCKVCache(self.layout, donor_rows) if donor_rows is not None else None},
            **{"do_sample": False, "pad_token_id": 0 if pad is None else pad, **options},
        )

        tokens = out.sequences[0, len(ids) :].tolist()
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        # The end token belongs to the answer, and padding behind it does not.
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        donor, similarity = (entry.task_id, entry.similarity) if entry is not None else (None, 0.0)
        computed = len(ids) if donor_rows is None else donor_rows.rows.shape[1]
        return TaskResult(tuple(tokens[:stop]), donor, similarity, len(ids), computed), out[
            CACHE_NAME
        ]

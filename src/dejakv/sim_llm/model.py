"""A causal language model that takes the top layer's KV of similar tasks from an `InterTaskKVManager`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from dejakv.blend.settings import TOP_LAYER_TAIL
from dejakv.blend.token_map import Donors, Ids
from dejakv.blend.top_layer import MATCHINGS, computed_rows, take_rows
from dejakv.engines.transformers.loading import no_bars
from dejakv.engines.transformers.top_layer import UNSOUND, moved_rows
from dejakv.engines.transformers.watch import ModelWatch
from dejakv.errors import ConfigError, InputError, ModelError
from dejakv.models import load
from dejakv.models.lckv.cache import KV, GivenRows, LCKVCache, held
from dejakv.models.lckv.layout import layout_of
from dejakv.sim_llm.tasks import InterTaskKVManager, TaskCacheEntry, TaskSimilarity


@dataclass(frozen=True)
class TaskResult:
    """tokens    the answer's token ids, up to and with the end token
    donor     task whose state was used; None on a miss
    computed  prompt rows that went through the condensed layers
    """

    tokens: tuple[int, ...]
    donor: str | None
    similarity: float
    prompt_tokens: int
    computed: int


class LlamaForCausalLMWithKVReuse:
    """Takes LCKV models; in ordinary ones this is unsound, and they are refused.

    tokenizer  for pad and sentence ends. `matching`, `tail`: see `reuse.top_layer.take_rows`. `similarity`: see `TaskSimilarity`
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        similarity: str = "mean",
        encoder: Any = None,
        matching: str = "map",
        tail: int = TOP_LAYER_TAIL,
    ) -> None:
        layout = layout_of(model)
        if layout is None:
            raise ModelError(
                f"{type(model).__name__} cannot take the top layer's KV of a similar task: {UNSOUND}. Use a layer-condensed model "
                "(docs-lckv is bundled), or blend for this one"
            )
        self.layout = layout
        if matching not in MATCHINGS:
            raise ConfigError(f"matching={matching!r} is unknown: choose one of {', '.join(MATCHINGS)}")
        if tail < 1:
            raise ConfigError(f"tail={tail} leaves no row to continue from: give at least 1")
        self.model, self.tokenizer, self.matching, self.tail = model.eval(), tokenizer, matching, tail
        self.similarity = TaskSimilarity(similarity, self.embed_tokens, encoder)
        self._watch = ModelWatch(model, tokenizer, None)
        self.manager: InterTaskKVManager | None = None

    @classmethod
    def from_pretrained(cls, model_path: str, *, device: str = "auto", **options: Any) -> "LlamaForCausalLMWithKVReuse":
        """A bundled name, a folder or a hub id. `similarity`, `encoder`, `matching`, `tail` as in the class; other options go
        to transformers. Raises: ModelError."""
        own = {k: options.pop(k) for k in ("similarity", "encoder", "matching", "tail") if k in options}
        with no_bars():
            model, tokenizer = load(model_path, **options)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device), tokenizer, **own)

    def __getattr__(self, name: str) -> Any:
        """What this class does not have is the model's: `config`, `device`, `dtype`, `generation_config`, ..."""
        if name == "model" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model, name)

    def to(self, *args: Any, **options: Any) -> "LlamaForCausalLMWithKVReuse":
        """Moves or converts the model in place."""
        self.model.to(*args, **options)
        return self

    def cuda(self, device: Any = None) -> "LlamaForCausalLMWithKVReuse":
        """Moves the model to a GPU. Raises what torch does without one."""
        self.model.cuda(device)
        return self

    def cpu(self) -> "LlamaForCausalLMWithKVReuse":
        """Moves the model to the CPU."""
        self.model.cpu()
        return self

    @property
    def epoch(self) -> str:
        """Fingerprint of the weights, tokenizer and numerics, renewed when they change; empty if they cannot be told apart."""
        self._watch.check()
        return self._watch.epoch

    def make_manager(self, max_cache_size: int = 100, similarity_threshold: float = 0.8, **options: Any) -> Any:
        """A manager that fits this model, connected. `options`: see `InterTaskKVManager`."""
        size, device = self.similarity.dim, str(self.model.device)
        self.set_kv_manager(
            InterTaskKVManager(size, max_cache_size, similarity_threshold, device=device, epoch=self.epoch, **options)
        )
        return self.manager

    def set_kv_manager(self, kv_manager: InterTaskKVManager | None) -> None:
        """Connects a cache of tasks; None: none. Raises: ConfigError if it is of another dimension."""
        if kv_manager is not None and kv_manager.embedding_dim != self.similarity.dim:
            raise ConfigError(
                f"the cache of tasks is for embeddings of {kv_manager.embedding_dim}, this model's have "
                f"{self.similarity.dim}: make it with embedding_dim={self.similarity.dim}"
            )
        self.manager = kv_manager

    def embed_tokens(self, token_ids: Sequence[int]) -> np.ndarray:
        """Input embeddings [tokens, hidden] float32."""
        ids = torch.tensor(list(token_ids), device=self.model.device)
        with torch.no_grad():
            return self.model.get_input_embeddings()(ids).float().cpu().numpy()

    def generate_with_kv_reuse(self, input_ids: Any, task_id: str | None = None, **options: Any) -> torch.Tensor:
        """[1, prompt + answer] token ids, as `generate` returns them, for [1, tokens] of one task."""
        ids = torch.as_tensor(input_ids)
        if ids.dim() != 2 or ids.shape[0] != 1:
            raise InputError(f"input_ids of shape {tuple(ids.shape)}: give one task [1, tokens]; `run` takes many")
        prompt = tuple(ids[0].tolist())
        [result] = self.run([prompt], [task_id], **options)
        return torch.tensor([[*prompt, *result.tokens]], device=ids.device)

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        task_ids: Sequence[str | None] | None = None,
        texts: Sequence[str] | None = None,
        *,
        enable_kv_reuse: bool = True,
        max_new_tokens: int = 100,
        **options: Any,
    ) -> list[TaskResult]:
        """One result for each prompt, in order. All hits run as one batch, and all misses as another, which are then kept.

        options  of `generate` (temperature, top_p, do_sample, ...). Raises: InputError for an empty or over-long prompt, or a
                 batch of several with a tokenizer that has no pad token
        """
        for prompt in prompts:
            self._check(len(prompt), max_new_tokens)
        texts = texts or [self.tokenizer.decode(prompt) for prompt in prompts]
        task_ids = task_ids or [None] * len(prompts)
        manager = self._current() if enable_kv_reuse else None
        found = [self._search(manager, ids, text) for ids, text in zip(prompts, texts, strict=True)]
        results: dict[int, TaskResult] = {}
        for wanted in (True, False):
            chosen = [i for i, entry in enumerate(found) if (entry is not None) == wanted]
            if chosen:
                entries = [found[i] for i in chosen]
                group = self._group([prompts[i] for i in chosen], entries, max_new_tokens, options)
                for i, (result, kv) in zip(chosen, group, strict=True):
                    results[i] = result
                    if manager is not None and kv is not None:
                        name = task_ids[i] or manager.generate_task_id(texts[i])
                        vector = self.similarity.embed(prompts[i], texts[i])
                        manager.add_task(name, vector, kv, token_ids=tuple(prompts[i]), text=texts[i])
        return [results[i] for i in range(len(prompts))]

    def _current(self) -> InterTaskKVManager | None:
        """The manager, under the model's present epoch; None if the model's state cannot be told apart."""
        epoch = self.epoch
        if self.manager is None or not epoch:
            return None
        self.manager.epoch = epoch
        return self.manager

    def _search(self, manager: InterTaskKVManager | None, ids: tuple[int, ...], text: str) -> TaskCacheEntry | None:
        if manager is None:
            return None

        def judge(donor: Sequence[int], cosine: float) -> float:
            """The similarity; none for a donor of which no row would be taken, so that it is no hit."""
            score = self.similarity.score(ids, donor, cosine)
            return score if score < manager.similarity_threshold or self._saves(ids, donor) else -math.inf

        return manager.search_similar_task(self.similarity.embed(ids, text), judge=judge)

    def _saves(self, ids: tuple[int, ...], donor: Sequence[int]) -> bool:
        """Whether a prompt takes any row of a donor. Of one without token ids it is not known."""
        return not donor or len(computed_rows(self._rows(ids, donor))) < len(ids)

    def _rows(self, ids: tuple[int, ...], donor: Sequence[int]) -> Ids:
        return take_rows(ids, Donors.of(donor), self.matching, self.embed_tokens, tail=self.tail, ends=self._ends)

    def _group(
        self, prompts: list[tuple[int, ...]], entries: list[Any], most: int, options: dict[str, Any]
    ) -> list[tuple[TaskResult, KV | None]]:
        """Results of prompts that are all hits or all misses, and on a miss the state to keep. They run as one batch, padded on the left."""
        hit = entries[0] is not None
        longest = max(len(ids) for ids in prompts)
        blank = [longest - len(ids) for ids in prompts]
        blank_id, device = self._pad(len(prompts)), self.model.device
        given = self._given(prompts, entries, blank, longest) if hit else None
        out = self.model.generate(
            torch.tensor(
                [[blank_id] * left + list(ids) for left, ids in zip(blank, prompts, strict=True)], device=device
            ),
            attention_mask=torch.tensor([[0] * left + [1] * (longest - left) for left in blank], device=device),
            past_key_values=LCKVCache(self.layout, given) if hit else None,
            max_new_tokens=most,
            return_dict_in_generate=True,
            **self._decoding(options),
        )
        computed = longest if given is None else given.rows.shape[1]
        made: list[tuple[TaskResult, KV | None]] = []
        for row, (ids, entry) in enumerate(zip(prompts, entries, strict=True)):
            kv = None if hit else self._state(out.past_key_values, row, len(ids), longest)
            made.append((self._result(out.sequences[row, longest:], entry, ids, min(computed, len(ids))), kv))
        return made

    def _given(
        self, prompts: list[tuple[int, ...]], entries: list[TaskCacheEntry], blank: list[int], longest: int
    ) -> GivenRows:
        """The donors' rows `[batch, heads, longest, dim]` of each stored layer, in the prompts' order, keys turned to their positions.
        As many rows are computed of each prompt as the neediest one asks for: to compute a known row is harmless."""
        plans = [self._rows(ids, entry.token_ids) for ids, entry in zip(prompts, entries, strict=True)]
        computed = [set((computed_rows(plan) + left).tolist()) for plan, left in zip(plans, blank, strict=True)]
        most = max(map(len, computed))
        index = [
            sorted([*own, *[i for i in range(longest - 1, -1, -1) if i not in own][: most - len(own)]])
            for own in computed
        ]
        stacks = [self._moved(entry, plan) for entry, plan in zip(entries, plans, strict=True)]

        def batch(slot: int, part: int) -> torch.Tensor:
            rows = [stack[slot][part] for stack in stacks]
            return torch.stack([pad(one, (0, 0, left, 0)) for one, left in zip(rows, blank, strict=True)])

        layers = enumerate(self.layout.task_layers)
        return GivenRows(
            {layer: (batch(slot, 0), batch(slot, 1)) for slot, layer in layers},
            torch.tensor(index, device=self.model.device),
        )

    def _moved(self, entry: TaskCacheEntry, plan: Ids) -> list[KV]:
        keys, values = self._kv(entry)
        return moved_rows(self.model, torch.stack([keys, values]), plan, np.arange(keys.shape[2]))

    def _kv(self, entry: TaskCacheEntry) -> KV:
        """A task's state on the model's device. Raises: ModelError if it is of another model."""
        keys, values = (part.to(self.model.device) for part in entry.top_layer_kv)
        config = self.model.config
        want = (len(self.layout.task_layers), config.num_key_value_heads, config.head_dim)
        got = (keys.shape[0], keys.shape[1], keys.shape[3])
        if want != got or keys.dtype != self.model.dtype:
            raise ModelError(
                f"the task's state is of another model: (layers, heads, dim) {got} in {keys.dtype}, this model has {want} "
                f"in {self.model.dtype}: keep one cache of tasks for each model (`epoch`)"
            )
        return keys, values

    def _state(self, cache: Cache, row: int, tokens: int, longest: int) -> KV:
        """Keys and values `[layers, kv heads, tokens, dim]` that a similar task may take, of one prompt of a batch; copies."""
        parts: list[list[torch.Tensor]] = [[], []]
        for layer in self.layout.task_layers:
            kv = held(cache, layer)
            assert kv is not None
            for part, tensor in zip(parts, kv, strict=True):
                part.append(tensor[row, :, longest - tokens : longest])
        return torch.stack(parts[0]), torch.stack(parts[1])

    def _result(
        self, made: torch.Tensor, entry: TaskCacheEntry | None, ids: tuple[int, ...], computed: int
    ) -> TaskResult:
        tokens = made.tolist()
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        donor, similarity = (entry.task_id, entry.similarity) if entry is not None else (None, 0.0)
        return TaskResult(tuple(tokens[:stop]), donor, similarity, len(ids), computed)

    def _decoding(self, options: dict[str, Any]) -> dict[str, Any]:
        chosen = {"do_sample": False, **options}
        if not chosen["do_sample"]:
            for name in ("temperature", "top_p", "top_k"):
                chosen.pop(name, None)
        return {"pad_token_id": self._pad(1), **chosen}

    @property
    def _ends(self) -> Any:
        """Ids of tokens that end a sentence, for the token map."""
        known = [self.tokenizer.convert_tokens_to_ids(mark) for mark in (".", "?", "!")]
        unknown = self.tokenizer.unk_token_id
        return np.array([i for i in known if i is not None and i != unknown], np.int64)

    def _pad(self, batch: int) -> int:
        pad = self.tokenizer.pad_token_id
        if pad is None and batch > 1:
            raise InputError(
                f"{type(self.tokenizer).__name__} has no pad token, which a batch of {batch} prompts needs: set "
                "tokenizer.pad_token = tokenizer.eos_token, or run the prompts one by one"
            )
        return 0 if pad is None else int(pad)

    def _check(self, tokens: int, most: int) -> None:
        limit = self.model.config.max_position_embeddings
        if not tokens:
            raise InputError("the prompt has no tokens: give a question")
        if tokens + most > limit:
            raise InputError(
                f"a prompt of {tokens} tokens with up to {most} for the answer is longer than the model's context of "
                f"{limit}: shorten the prompt, or give a smaller max_new_tokens"
            )

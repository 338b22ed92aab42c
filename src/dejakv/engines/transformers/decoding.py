"""From a prompt and its state to tokens: one call of `generate`, whatever the way of sampling."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from dejakv.blend.attention_probe import AttentionProbe
from dejakv.blend.prune import PrunableDynamicCache, PruneConfig, check_prunable, install_hooks
from dejakv.config import PrunePolicy
from dejakv.engines.base import Accept, OnToken
from dejakv.engines.transformers.kv import copied
from dejakv.errors import ModelError
from dejakv.models.lckv.layout import layout_of
from dejakv.request import Request, Sampling


class TextDetokenizer:
    """Text piece by piece. A piece that ends inside a character is held back until the character is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._given = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        emitted_text = self._text(self._tokens[self._start : self._given])
        text = self._text(self._tokens[self._start :])
        if text.endswith("�") or len(text) < len(emitted_text):
            return ""
        # Some tokenizers drop a first token's space: one piece stays in front of the next.
        self._start, self._given = self._given, len(self._tokens)
        return text[len(emitted_text) :]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TokenSink:
    """Passes tokens on, and knows whether there was any."""

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self.any = False

    def __call__(self, token: int, text: str) -> None:
        self.any = True
        self._on_token(token, text)


class TokenObserver(StoppingCriteria):
    """Never stops. Notes when the run began and when its first token was there, in seconds of `perf_counter`, and passes the tokens of a
    single row on as they come.

    rows  that `generate` makes of the prompt: beams, or sequences asked for
    look  tells whether the model is what it was, asked once the prompt is computed; `same` is its answer
    """

    def __init__(self, rows: int, tokenizer: Any, on_token: OnToken | None) -> None:
        self.began = time.perf_counter()
        self.first: float | None = None
        self.rows, self._pieces, self._on_token = rows, TextDetokenizer(tokenizer), on_token
        self.look: Callable[[], bool] | None = None
        self.same = True

    def behind_prefill(self) -> None:
        """Looks at the model, before any code of the caller runs: it may change it and change it back."""
        # Only once: later steps follow code of the caller's.
        model_check, self.look = self.look, None
        if model_check is not None:
            self.same = model_check()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        # Beams change until the search ends: their tokens are sent after it.
        if self.rows == 1:
            self.first = self.first or time.perf_counter()
            self.tell(int(input_ids[0, -1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def tell(self, token: int) -> None:
        """Passes a token on, with its text."""
        if self._on_token is not None:
            self._on_token(token, self._pieces.add(token))


class StopTexts(StoppingCriteria):
    """Stops one row when its new text holds one of `stops`: of the prompt's own text no stop is made, as `stop_strings` would."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._pieces = TextDetokenizer(tokenizer)
        self._stops = stops
        # So much of the earlier text may be the beginning of a stop text.
        self._held = max(map(len, stops)) - 1
        self._end = ""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        text = self._end + self._pieces.add(int(input_ids[0, -1]))
        self._end = text[len(text) - self._held :] if self._held else ""
        return torch.tensor([any(stop in text for stop in self._stops)], device=input_ids.device)


def sampling_arguments(sampling: Sampling, room: int, tokenizer: Any) -> dict[str, Any]:
    """Arguments of `generate`. Those that `Sampling` does not name (repetition penalty, top-k) stay the model's own."""
    arguments: dict[str, Any] = {
        "max_new_tokens": max(1, min(sampling.max_new_tokens, room)),
        "num_beams": sampling.num_beams,
        "do_sample": not sampling.greedy,
        "temperature": 1.0 if sampling.greedy else sampling.temperature,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
    }

    if sampling.greedy:
        # The default of transformers, which warns of any other value in greedy search.
        arguments["top_k"] = 50
    if sampling.stop and sampling.num_beams == 1:
        arguments["stopping_criteria"] = StoppingCriteriaList([StopTexts(tokenizer, sampling.stop)])
    return arguments


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Makes draws repeatable within, and leaves the process's generators as they were."""
    # To fork the generators of all GPUs would initialize them.
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def generate(
    model: Any, ids: torch.Tensor, cache: Cache | None, arguments: Mapping[str, Any], steps: TokenObserver
) -> Any:
    """Continue `ids` `[1, n]` from a cache of its first tokens (None: the model's own); return the result of `generate`. Calls the class's
    `generate`: the object's own may be the caller (see `attach`)."""
    criteria = StoppingCriteriaList([*(arguments.get("stopping_criteria") or []), steps])
    extra_arguments: dict[str, Any] = {"past_key_values": cache} if cache is not None else {}
    if steps.look is not None:
        # First of all processors: the others are the caller's code, which may change the model.
        extra_arguments["logits_processor"] = LogitsProcessorList(
            [_Behind(steps), *(arguments.get("logits_processor") or [])]
        )
    return type(model).generate(model, input_ids=ids, **{**arguments, **extra_arguments, "stopping_criteria": criteria})


@torch.no_grad()
def prefill(
    model: Any,
    ids: torch.Tensor,
    cache: Cache,
    cached_tokens: int,
    positions: torch.Tensor | None,
    features: Mapping[str, Any],
) -> None:
    """All of `ids` `[1, n]` into a cache that holds the first `cached_tokens`, as `generate` does with a piece of a prompt."""
    n = ids.shape[1]
    position_ids = positions if positions is not None else torch.arange(n, device=ids.device)[None]
    # Logits of all rows would take rows x vocabulary numbers.
    last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    model(
        input_ids=ids[:, cached_tokens:], past_key_values=cache, attention_mask=torch.ones_like(ids), position_ids=position_ids[..., cached_tokens:n],
        use_cache=True, return_dict=True, **last, **features,
    )  # fmt: skip


def special_tokens(model: Any, tokenizer: Any) -> dict[str, Any]:
    """End token of the model's settings, else the tokenizer's; padding token of these settings, else the first end token, else 0."""
    config = model.generation_config
    end = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    first = end[0] if isinstance(end, list) else end
    pad = config.pad_token_id if config.pad_token_id is not None else first
    token_ids = {"eos_token_id": end, "pad_token_id": 0 if pad is None else pad}
    return {name: value for name, value in token_ids.items() if value is not None}


def width(model: Any, arguments: Mapping[str, Any]) -> int:
    """Rows of one prompt in `generate`: the larger of beams and returned sequences."""
    configs = (arguments.get("generation_config"), model.generation_config)

    def setting(name: str) -> int:
        candidates = (arguments.get(name), *(getattr(config, name, None) for config in configs))
        return next((int(value) for value in candidates if value is not None), 1)

    return max(setting("num_beams"), setting("num_return_sequences"))


class FirstTokenDeclined(Exception):
    """The first token is not to be given; the message says why."""


class _Behind(LogitsProcessor):
    """Looks at the model directly behind the prompt's forward, and changes no score."""

    def __init__(self, steps: TokenObserver) -> None:
        self._steps = steps

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._steps.behind_prefill()
        return scores


class FirstLogits(LogitsProcessor):
    """Asks once, at the first step, and changes no score."""

    def __init__(self, accept: Accept) -> None:
        self._accept: Accept | None = accept

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        accept, self._accept = self._accept, None
        if accept is not None:
            reason = accept(scores[0].float().log_softmax(-1).cpu().numpy())
            if reason:
                raise FirstTokenDeclined(reason)
        return scores


def asking(arguments: Mapping[str, Any], accept: Accept) -> dict[str, Any]:
    """The arguments of `generate`, with a processor that asks `accept` about the first token."""
    processors = arguments.get("logits_processor") or []
    return {**arguments, "logits_processor": LogitsProcessorList([FirstLogits(accept), *processors])}


def pruning_of(policy: PrunePolicy, model: Any) -> PruneConfig | None:
    """The settings of a policy, None for `none`. Raises: ModelError for a model whose layers cannot be pruned."""
    if policy == "none":
        return None
    if layout_of(model) is not None:
        raise ModelError(
            f"the layers of {type(model).__name__} share one layer's KV, which is pruned for none of them alone: leave out --prune"
        )
    check_prunable(model)
    install_hooks(model)  # before the model is watched for changes
    return PruneConfig(policy=policy)


def may_prune(request: Request) -> bool:
    """Whether to decode from pruned state: not if a request asks for exact reuse, or none."""
    return request.reuse not in ("off", "exact")


@torch.inference_mode()
def prefill_pruned(
    model: Any,
    ids: torch.Tensor,
    cache: Cache,
    cached_tokens: int,
    positions: torch.Tensor | None,
    features: Mapping[str, Any],
    config: PruneConfig,
) -> PrunableDynamicCache:
    """Compute `ids` `[1, n]` into a cache that holds the first `cached_tokens`, and return a pruned copy of all but the last token. The last token
    is computed twice: here for its attention, and again from the pruned state. Raises: ModelError if the cache cannot be pruned."""
    with AttentionProbe(config.window) as probe:
        prefill(model, ids, cache, cached_tokens, positions, features)

    before = copied(cache, ids.shape[1] - 1)
    if before is None:
        raise ModelError(f"the state of {type(model).__name__} has no plain rows to prune: leave out --prune")
    return PrunableDynamicCache.of(model, before, probe.weights, config)


@torch.inference_mode()
def continued(
    model: Any, cache: Cache | None, ids: torch.Tensor, position_ids: torch.Tensor | None, tokens: Sequence[int]
) -> NDArray[np.float32] | None:
    """Log probabilities `[len(tokens), vocabulary]` float32 of the tokens of some answer, row i given the prompt and the first i
    tokens (teacher forcing). None if the cache holds no plain rows of the prompt.

    It reads the prompt's rows of `cache` and changes nothing there; the prompt's last token is computed again.

    ids    `[1, prompt]`
    position_ids  position ids `[..., prompt]` where the model counts in its own way, else None
    """
    prefix_tokens = ids.shape[1] - 1
    start = copied(cache, prefix_tokens) if cache is not None else None
    if start is None or not tokens:
        return None

    input_ids = torch.cat([ids[:, -1:], torch.tensor([list(tokens[:-1])], dtype=ids.dtype, device=ids.device)], dim=1)
    steps = torch.arange(len(tokens), device=ids.device)
    last = position_ids[..., -1:] if position_ids is not None else torch.full((1, 1), prefix_tokens, device=ids.device)

    output = model(
        input_ids=input_ids, past_key_values=start, position_ids=last + steps, use_cache=True, return_dict=True
    )
    return output.logits[0].float().log_softmax(-1).cpu().numpy()

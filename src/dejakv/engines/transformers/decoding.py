"""From a prompt and its state to tokens: one call of `generate`, whatever the way of sampling."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache

from dejakv.blend.attention_probe import AttentionProbe
from dejakv.blend.prune import PrunableDynamicCache, PruneConfig, check_prunable, install_hooks
from dejakv.config import PrunePolicy
from dejakv.engines.base import Accept, OnToken
from dejakv.engines.transformers.kv import copy_prefix, empty_cache
from dejakv.errors import ModelError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.models.layout import layout_of
from dejakv.request import Request, Sampling

_SCORED_TOKENS = 64
"""Tokens of an answer whose log probabilities are in memory at once."""


class TextDetokenizer:
    """Decodes tokens as they come, each text added to the ones before.

    A token that ends inside a character adds nothing until the character is complete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._emitted = 0

    def add(self, token: int) -> str:
        """Return the text that a token adds."""
        self._tokens.append(token)
        emitted_text = self._text(self._tokens[self._start : self._emitted])
        text = self._text(self._tokens[self._start :])
        if text.endswith("�") or len(text) < len(emitted_text):
            return ""
        # Some tokenizers drop a first token's space: one piece stays in front of the next.
        self._start, self._emitted = self._emitted, len(self._tokens)
        return text[len(emitted_text) :]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class TokenSink:
    """Passes tokens on, and knows whether there was any.

    Attributes
    ----------
    received : bool
        Whether a token was passed on.
    """

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self.received = False

    def __call__(self, token: int, text: str) -> None:
        """Pass a token on."""
        self.received = True
        self._on_token(token, text)


class TokenObserver(StoppingCriteria):
    """Stopping criterion that only observes: it never stops.

    It notes when the run began and when its first token was there, and passes the tokens of a
    single row on as they come.

    Parameters
    ----------
    rows : int
        Rows that `generate` makes of the prompt: beams, or sequences asked for.
    on_token : OnToken or None
        Called with each token and the text that it adds.

    Attributes
    ----------
    start_time, first_token_time : float
        Seconds of `perf_counter`; None before the first token.
    model_check : Callable[[], bool] or None
        Tells whether the model is what it was. It is asked once the prompt is computed.
    model_unchanged : bool
        Its answer.
    """

    def __init__(self, rows: int, tokenizer: Any, on_token: OnToken | None) -> None:
        self.start_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.rows, self._detokenizer, self._on_token = rows, TextDetokenizer(tokenizer), on_token
        self.model_check: Callable[[], bool] | None = None
        self.model_unchanged = True

    def check_after_prefill(self) -> None:
        """Look at the model before any code of the caller runs.

        That code may change the model and change it back.
        """
        # Only once: later steps follow code of the caller's.
        model_check, self.model_check = self.model_check, None
        if model_check is not None:
            self.model_unchanged = model_check()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Note the first token's time and pass the token on; never stop."""
        # Beams change until the search ends: their tokens are sent after it.
        if self.rows == 1:
            self.first_token_time = self.first_token_time or time.perf_counter()
            self.tell(int(input_ids[0, -1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def tell(self, token: int) -> None:
        """Pass a token on, with its text."""
        if self._on_token is not None:
            self._on_token(token, self._detokenizer.add(token))


class StopTexts(StoppingCriteria):
    """Stops one row when its new text holds one of `stops`.

    `stop_strings` of transformers would also stop by the end of the prompt's own text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._detokenizer = TextDetokenizer(tokenizer)
        self._stops = stops
        # So much of the earlier text may be the beginning of a stop text.
        self._tail_length = max(map(len, stops)) - 1
        self._tail = ""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Stop once the new text holds a stop text."""
        text = self._tail + self._detokenizer.add(int(input_ids[0, -1]))
        self._tail = text[len(text) - self._tail_length :] if self._tail_length else ""
        return torch.tensor([any(stop in text for stop in self._stops)], device=input_ids.device)


def sampling_arguments(sampling: Sampling, room: int, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of `generate` for a sampling.

    Arguments that `Sampling` does not name (repetition penalty, top-k) stay the model's own.

    Parameters
    ----------
    room : int
        Tokens that the context has left for the answer.
    """
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
    """Make draws repeatable within, and leave the process's generators as they were."""
    # To fork the generators of all GPUs would initialize them.
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def generate(
    model: Any,
    ids: torch.Tensor,
    cache: Cache | None,
    arguments: Mapping[str, Any],
    steps: TokenObserver,
) -> Any:
    """Continue `ids` `[1, n]` from a cache of its first tokens, by the class's `generate`.

    The object's own `generate` may be the caller (see `attach`).

    Parameters
    ----------
    cache : Cache or None
        None for the model's own.

    Returns
    -------
    Tensor or ModelOutput
        The result of `generate`.
    """
    criteria = StoppingCriteriaList([*(arguments.get("stopping_criteria") or []), steps])
    extra_arguments: dict[str, Any] = {CACHE_NAME: cache} if cache is not None else {}
    if steps.model_check is not None:
        # First of all processors: the others are the caller's code, which may change the model.
        extra_arguments["logits_processor"] = LogitsProcessorList(
            [_Behind(steps), *(arguments.get("logits_processor") or [])]
        )
    return type(model).generate(
        model, input_ids=ids, **{**arguments, **extra_arguments, "stopping_criteria": criteria}
    )


@torch.no_grad()
def prefill(
    model: Any,
    ids: torch.Tensor,
    cache: Cache,
    cached_tokens: int,
    positions: torch.Tensor | None,
    features: Mapping[str, Any],
) -> None:
    """Compute `ids` `[1, n]` into a cache, as `generate` does with a part of a prompt.

    Parameters
    ----------
    cached_tokens : int
        Tokens at the beginning that the cache holds already.
    positions : Tensor or None
        Position ids of the whole prompt, where the model counts in its own way.
    features : Mapping[str, Any]
        Arguments that make the forward ask for a picture's features.
    """
    n = ids.shape[1]
    position_ids = positions if positions is not None else torch.arange(n, device=ids.device)[None]
    # Logits of all rows would take rows x vocabulary numbers.
    last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    model(
        input_ids=ids[:, cached_tokens:], attention_mask=torch.ones_like(ids),
        position_ids=position_ids[..., cached_tokens:n], use_cache=True, return_dict=True,
        **{CACHE_NAME: cache}, **last, **features,
    )  # fmt: skip


def special_tokens(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the end and padding tokens of an answer.

    The end token is that of the model's settings, else the tokenizer's. The padding token is that
    of these settings, else the first end token, else 0.
    """
    config = model.generation_config
    end = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    first = end[0] if isinstance(end, list) else end
    pad = config.pad_token_id if config.pad_token_id is not None else first
    token_ids = {"eos_token_id": end, "pad_token_id": 0 if pad is None else pad}
    return {name: value for name, value in token_ids.items() if value is not None}


def generate_rows(model: Any, arguments: Mapping[str, Any]) -> int:
    """Return the rows of one prompt in `generate`: the larger of beams and returned sequences."""
    configs = (arguments.get("generation_config"), model.generation_config)

    def setting(name: str) -> int:
        candidates = (arguments.get(name), *(getattr(config, name, None) for config in configs))
        return next((int(value) for value in candidates if value is not None), 1)

    return max(setting("num_beams"), setting("num_return_sequences"))


class FirstTokenDeclined(Exception):
    """The first token is declined; the message says why."""


class _Behind(LogitsProcessor):
    """Looks at the model directly behind the prompt's forward, and changes no score."""

    def __init__(self, steps: TokenObserver) -> None:
        self._steps = steps

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._steps.check_after_prefill()
        return scores


class FirstLogits(LogitsProcessor):
    """Asks about the first token once, at the first step, and changes no score."""

    def __init__(self, accept: Accept) -> None:
        self._accept: Accept | None = accept

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Ask about the first token; raise FirstTokenDeclined if it is declined."""
        accept, self._accept = self._accept, None
        if accept is not None:
            reason = accept(scores[0].float().log_softmax(-1).cpu().numpy())
            if reason:
                raise FirstTokenDeclined(reason)
        return scores


def with_accept(arguments: Mapping[str, Any], accept: Accept) -> dict[str, Any]:
    """Return the arguments of `generate` with a processor that asks about the first token."""
    processors = arguments.get("logits_processor") or []
    return {
        **arguments,
        "logits_processor": LogitsProcessorList([FirstLogits(accept), *processors]),
    }


def pruning_of(policy: PrunePolicy, model: Any) -> PruneConfig | None:
    """Return the settings of a policy, and prepare the model for them; None for `none`.

    Raises
    ------
    ModelError
        The model's layers cannot be pruned.
    """
    if policy == "none":
        return None
    if layout_of(model) is not None:
        raise ModelError(
            f"the layers of {type(model).__name__} share one layer's KV, which is pruned for none "
            "of them alone: leave out --prune"
        )
    check_prunable(model)
    # Before the model is watched for changes.
    install_hooks(model)
    return PruneConfig(policy=policy)


def may_prune(request: Request) -> bool:
    """Tell whether to decode from pruned state: not if a request asks for exact reuse, or none."""
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
    """Prefill a prompt and return a pruned copy of all but its last token.

    The last token is computed twice: here for its attention, and again from the pruned state. See
    `prefill` for the parameters.

    Raises
    ------
    ModelError
        The cache cannot be pruned.
    """
    with AttentionProbe(config.window) as probe:
        prefill(model, ids, cache, cached_tokens, positions, features)

    before = copy_prefix(cache, ids.shape[1] - 1)
    if before is None:
        raise ModelError(
            f"the state of {type(model).__name__} has no plain rows to prune: leave out --prune"
        )
    return PrunableDynamicCache.of(model, before, probe.weights, config)


@torch.inference_mode()
def answer_logprobs(
    model: Any,
    cache: Cache | None,
    ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    tokens: Sequence[int],
) -> Iterator[NDArray[np.float32]]:
    """Yield the log probabilities of the tokens of some answer (teacher forcing), in pieces.

    It reads the prompt's rows of `cache` and changes nothing there. The prompt's last token is
    computed again.

    Parameters
    ----------
    ids : Tensor, shape [1, prompt]
        Tokens of the prompt.
    position_ids : Tensor, shape [..., prompt], or None
        Position ids where the model counts in its own way.
    tokens : Sequence[int]
        Tokens of the answer.

    Yields
    ------
    NDArray, shape [up to 64, vocabulary]
        Float32; row i of all pieces is given the prompt and the first i tokens. No piece comes if
        the cache holds no plain rows of the prompt.
    """
    prefix_tokens = ids.shape[1] - 1
    start = (
        copy_prefix(cache, prefix_tokens, empty_cache(layout_of(model)))
        if cache is not None
        else None
    )
    if start is None:
        return

    input_ids = torch.cat(
        [ids[:, -1:], torch.tensor([list(tokens[:-1])], dtype=ids.dtype, device=ids.device)], dim=1
    )
    steps = torch.arange(len(tokens), device=ids.device)
    last = (
        position_ids[..., -1:]
        if position_ids is not None
        else torch.full((1, 1), prefix_tokens, device=ids.device)
    )

    # All at once, the rows of a long answer would be gigabytes.
    for begin in range(0, len(tokens), _SCORED_TOKENS):
        piece = slice(begin, begin + _SCORED_TOKENS)
        output = model(
            input_ids=input_ids[:, piece],
            position_ids=last + steps[piece],
            use_cache=True,
            return_dict=True,
            **{CACHE_NAME: start},
        )
        yield output.logits[0].float().log_softmax(-1).cpu().numpy()

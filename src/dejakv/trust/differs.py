"""What a wrong answer is: how an approximate answer must not differ from full computation's. Both are greedy, whatever the request samples
with: two samples of one distribution differ without anybody's fault."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError, InputError
from dejakv.request import Request
from dejakv.settings import named, shown


@dataclass(frozen=True)
class ComparedAnswer:
    """One of the two answers.

    continued  log probabilities `[tokens, vocabulary]` of given tokens after the prompt; None if the engine has none
    """

    text: str
    token_ids: tuple[int, ...]
    continued: Callable[[Sequence[int]], NDArray[np.float32] | None] = lambda _: None


@dataclass(frozen=True)
class AnswerComparison:
    """Compares a full and a reused answer to one request. What `wrong` raises counts as wrong.

    wrong   `(request, full, reused)`: whether the reused answer is wrong
    tokens  length of the answers to compare; None: what the request asks for
    logits  whether `ComparedAnswer.continued` is read, so that an answer known as text will not do
    """

    wrong: Callable[[Request, ComparedAnswer, ComparedAnswer], bool]
    tokens: int | None = None
    logits: bool = False


NAMED = {
    "first": AnswerComparison(lambda _, full, reused: full.token_ids[:1] != reused.token_ids[:1], tokens=1),
    "answer": AnswerComparison(lambda _, full, reused: full.text != reused.text),
}
"""Another first token; another text."""


def differs_of(text: str) -> AnswerComparison:
    """What a setting `differs` names. Raises: ConfigError for an unknown name, and for a function that does not import.

    >>> asked, full, reused = Request("r", "Where?", "Where?"), ComparedAnswer("In Rome.", (7, 8)), ComparedAnswer("In Oslo.", (7, 9))
    >>> [differs_of(name).wrong(asked, full, reused) for name in ("first", "answer")]
    [False, True]
    """
    if text in NAMED:
        return NAMED[text]

    kind, colon, value = text.partition(":")
    if kind == "kl" and colon:
        return _distribution(_nats(text, value))
    if colon and kind and value:
        judge = named(text, "--differs")
        return AnswerComparison(lambda request, full, reused: bool(judge(request, full.text, reused.text)))
    raise ConfigError(
        f"--differs {shown(text)} is unknown: give {', '.join(NAMED)}, kl:NATS (such as kl:0.05) or package.module:function"
    )


def _nats(text: str, value: str) -> float:
    try:
        nats = float(value)
    except ValueError:
        # Refused below like every other number out of range.
        nats = math.nan
    if not 0 < nats < math.inf:
        raise ConfigError(f"--differs {shown(text)}: give a divergence above 0 in nats, such as kl:0.05")
    return nats


def _distribution(max_nats: float) -> AnswerComparison:
    """The first token's distribution diverges from full computation's by more than `max_nats` nats."""

    def wrong(_request: Request, full: ComparedAnswer, reused: ComparedAnswer) -> bool:
        first_token = full.token_ids[:1] or (0,)  # any token: its distribution is the prompt's
        full_logprobs, reused_logprobs = full.continued(first_token), reused.continued(first_token)
        if full_logprobs is None or reused_logprobs is None:
            raise InputError(
                "the engine gives no log probabilities of this prompt: choose another way to differ than kl, or another engine"
            )
        return (
            not float(divergence(full_logprobs[:1], reused_logprobs[:1])[0]) <= max_nats
        )  # what is no number is wrong

    return AnswerComparison(wrong, tokens=1, logits=True)


def divergence(full_logprobs: NDArray[np.float32], reused_logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of `reused_logprobs` from `full_logprobs` at each token, `[tokens]`, in nats, from two arrays
    `[tokens, vocabulary]` of log probabilities."""
    # Rounding may give a little less than 0, which no divergence is.
    return np.maximum(0.0, np.sum(np.exp(full_logprobs) * (full_logprobs - reused_logprobs), axis=-1, dtype=np.float64))

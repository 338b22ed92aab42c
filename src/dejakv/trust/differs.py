"""Definitions of a wrong answer: which differences from full computation's answer count.

Both answers are greedy, whatever the request samples with, since two samples of one distribution
differ without anybody's fault.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError, InputError
from dejakv.request import Request
from dejakv.settings import display, import_object


@dataclass(frozen=True)
class ComparedAnswer:
    """One of the two answers.

    Attributes
    ----------
    text : str
        Text of the answer.
    token_ids : tuple[int, ...]
        Tokens of the answer.
    continued : Callable[[Sequence[int]], float32 array or None]
        Function that returns the log probabilities `[tokens, vocabulary]` of tokens after the
        prompt, or None if the engine has none.
    """

    text: str
    token_ids: tuple[int, ...]
    continued: Callable[[Sequence[int]], NDArray[np.float32] | None] = lambda _: None


@dataclass(frozen=True)
class AnswerComparison:
    """Comparison of a full and a reused answer to one request.

    An exception in `wrong` counts as a wrong answer.

    Attributes
    ----------
    wrong : Callable[[Request, ComparedAnswer, ComparedAnswer], bool]
        Function of request, full answer and reused answer that returns whether the reused one is
        wrong.
    tokens : int, optional
        Length of the answers to compare. None takes what the request asks for.
    logits : bool
        Whether `ComparedAnswer.continued` is read, so that the text of an answer is not enough.
    """

    wrong: Callable[[Request, ComparedAnswer, ComparedAnswer], bool]
    tokens: int | None = None
    logits: bool = False


NAMED = {
    "first": AnswerComparison(
        lambda _, full, reused: full.token_ids[:1] != reused.token_ids[:1], tokens=1
    ),
    "answer": AnswerComparison(lambda _, full, reused: full.text != reused.text),
}
"""Comparisons by name: another first token, and another text."""


def differs_of(text: str) -> AnswerComparison:
    """Return the comparison that a setting `differs` names.

    Raises
    ------
    ConfigError
        For an unknown name, a divergence that is not above 0, and a function that cannot be
        imported.

    Examples
    --------
    >>> asked = Request("r", "Where?", "Where?")
    >>> full, reused = ComparedAnswer("In Rome.", (7, 8)), ComparedAnswer("In Oslo.", (7, 9))
    >>> [differs_of(name).wrong(asked, full, reused) for name in ("first", "answer")]
    [False, True]
    """
    if text in NAMED:
        return NAMED[text]

    kind, colon, value = text.partition(":")
    if kind == "kl" and colon:
        return _distribution(_nats(text, value))
    if colon and kind and value:
        judge = import_object(text, "--differs")
        return AnswerComparison(
            lambda request, full, reused: bool(judge(request, full.text, reused.text))
        )
    raise ConfigError(
        f"--differs {display(text)} is unknown: give {', '.join(NAMED)}, kl:NATS "
        "(such as kl:0.05) or package.module:function"
    )


def _nats(text: str, value: str) -> float:
    try:
        nats = float(value)
    except ValueError:
        # Refused below like every other number out of range.
        nats = math.nan
    if not 0 < nats < math.inf:
        raise ConfigError(
            f"--differs {display(text)}: give a divergence above 0 in nats, such as kl:0.05"
        )
    return nats


def _distribution(max_nats: float) -> AnswerComparison:
    """Compare the distributions of the first token: wrong above `max_nats` nats of divergence."""

    def wrong(_request: Request, full: ComparedAnswer, reused: ComparedAnswer) -> bool:
        # Any token: its distribution is the prompt's.
        first_token = full.token_ids[:1] or (0,)

        full_logprobs, reused_logprobs = full.continued(first_token), reused.continued(first_token)
        if full_logprobs is None or reused_logprobs is None:
            raise InputError(
                "the engine gives no log probabilities of this prompt: choose "
                "another way to differ than kl, or another engine"
            )
        # Not written as "greater": NaN compares false, and counts as wrong.
        return not float(divergence(full_logprobs[:1], reused_logprobs[:1])[0]) <= max_nats

    return AnswerComparison(wrong, tokens=1, logits=True)


def divergence(
    full_logprobs: NDArray[np.float32], reused_logprobs: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Compute the Kullback-Leibler divergence of reused from full computation at each token.

    Parameters
    ----------
    full_logprobs, reused_logprobs : float32 array, shape [tokens, vocabulary]
        Log probabilities.

    Returns
    -------
    float64 array, shape [tokens]
        Divergence in nats.
    """
    # Rounding may give a little less than 0, which no divergence is.
    return np.maximum(
        0.0,
        np.sum(
            np.exp(full_logprobs) * (full_logprobs - reused_logprobs), axis=-1, dtype=np.float64
        ),
    )

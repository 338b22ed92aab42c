"""What a wrong answer is: how an approximate answer must not differ from the one of full computation.

Both answers are greedy, whatever the request samples with: two samples of one distribution differ without anybody's fault. So the bound
of a request that is sampled is one on the greedy answer to its prompt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dejakv.dotted import named
from dejakv.errors import ConfigError, InputError
from dejakv.request import Request
from dejakv.settings import shown
from dejakv.trust.tool_calls import tool_calls


@dataclass(frozen=True)
class Seen:
    """One of the two answers.

    continued  log probabilities `[tokens, vocabulary]` of given tokens after the prompt; None if the engine has none
    computed   tokens of the prompt that were computed for it; None for an answer that was known
    """

    text: str
    token_ids: tuple[int, ...]
    continued: Callable[[Sequence[int]], NDArray[np.float32] | None] = lambda _: None
    computed: int | None = None


class Differs(Protocol):
    """Compares a full and a reused answer to one request.

    tokens  of how many tokens an answer must be; None: of as many as the request asks for
    logits  whether `Seen.continued` is asked, so that an answer that is known will not do
    """

    @property
    def tokens(self) -> int | None: ...

    @property
    def logits(self) -> bool: ...

    def wrong(self, request: Request, full: Seen, reused: Seen) -> bool:
        """Whether the reused answer is wrong. What it raises counts as wrong."""
        ...


@dataclass(frozen=True)
class FirstTokenDiffers:
    """Another first token."""

    tokens: int | None = 1
    logits: bool = False

    def wrong(self, request: Request, full: Seen, reused: Seen) -> bool:
        return full.token_ids[:1] != reused.token_ids[:1]


@dataclass(frozen=True)
class AnswerDiffers:
    """Another text."""

    tokens: int | None = None
    logits: bool = False

    def wrong(self, request: Request, full: Seen, reused: Seen) -> bool:
        return full.text != reused.text


@dataclass(frozen=True)
class ToolDiffers:
    """A tool call became prose or prose a tool call, or tools, their arguments or their order are others. The order of an argument's
    keys does not matter, and prose beside calls does not either."""

    tokens: int | None = None
    logits: bool = False

    def wrong(self, request: Request, full: Seen, reused: Seen) -> bool:
        return tool_calls(full.text) != tool_calls(reused.text)


@dataclass(frozen=True)
class DistributionDiffers:
    """The first token's distribution diverges from full computation's by more than `most` nats (Kullback and Leibler)."""

    most: float
    tokens: int | None = 1
    logits: bool = True

    def wrong(self, request: Request, full: Seen, reused: Seen) -> bool:
        given = full.token_ids[:1] or (0,)  # any token: its distribution is the prompt's
        wanted, got = full.continued(given), reused.continued(given)
        if wanted is None or got is None:
            raise InputError(
                "the engine gives no log probabilities of this prompt: choose another way to differ than kl, or another engine"
            )
        return not float(divergence(wanted[:1], got[:1])[0]) <= self.most  # what is no number is wrong


@dataclass(frozen=True)
class OwnDiffers:
    """Whatever a function of the user's says of `(request, full_text, reused_text)`: true if the reused answer is wrong."""

    function: Callable[[Request, str, str], object]
    tokens: int | None = None
    logits: bool = False

    def wrong(self, request: Request, full: Seen, reused: Seen) -> bool:
        return bool(self.function(request, full.text, reused.text))


NAMED: dict[str, Differs] = {"first": FirstTokenDiffers(), "answer": AnswerDiffers(), "tool": ToolDiffers()}


def differs_of(text: str) -> Differs:
    """What a setting `differs` names. Raises: ConfigError for an unknown name, and for a function that does not import."""
    if text in NAMED:
        return NAMED[text]
    kind, colon, value = text.partition(":")
    if kind == "kl" and colon:
        return DistributionDiffers(_nats(text, value))
    if colon and kind and value:
        return OwnDiffers(named(text, "--differs"))
    raise ConfigError(
        f"--differs {shown(text)} is unknown: give {', '.join(NAMED)}, kl:NATS (such as kl:0.05) or package.module:function"
    )


def _nats(text: str, value: str) -> float:
    try:
        nats = float(value)
    except ValueError:
        nats = math.nan
    if not 0 < nats < math.inf:
        raise ConfigError(f"--differs {shown(text)}: give a divergence above 0 in nats, such as kl:0.05")
    return nats


def divergence(wanted: NDArray[np.float32], got: NDArray[np.float32]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of `got` from `wanted` at each token, `[tokens]`, in nats, from two arrays
    `[tokens, vocabulary]` of log probabilities."""
    return np.maximum(0.0, np.sum(np.exp(wanted) * (wanted - got), axis=-1, dtype=np.float64))

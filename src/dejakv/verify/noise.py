"""How far two answers are apart, and how far apart a server's own rounding moves them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from dejakv.verify.client import ServerAnswer

SAME = 1e-6
"""Largest distance (nats) of answers that count as equal: the digits that servers print."""
NOISE_FACTOR = 4.0
"""Distances up to this many times the largest measured noise are rounding."""
LEAST_LIMIT = 0.005
"""Least limit (nats), since a cache computes in other shapes than those that were measured."""
REPEAT_FACTOR, UNMEASURED_LIMIT, EXACT_LIMIT = 3.0, 0.1, 0.02
"""Limits (nats) of a server that answers equally in batches, so that its arithmetic is unknown: if
plain repeats differ from first answers, the factor times their largest distance, and at most the
first limit, as a fault may have moved them; the second if they do not differ and nobody knows
whether a cache served them.
"""


def distance(first: ServerAnswer, second: ServerAnswer) -> float:
    """Return how far two answers are apart, as a symmetric distance.

    It is the mean over the tokens that both answers begin with, and the first that differs, of the
    mean absolute difference of the likeliest tokens' log probabilities. A token that one side does
    not list counts with the least that its log probability can differ. After the first different
    token the prompts differ, and nothing is comparable.

    Parameters
    ----------
    first, second : ServerAnswer
        Answers to the same prompt.

    Returns
    -------
    float
        Distance in nats; of answers without log probabilities 0 for equal texts, and else 1.

    Examples
    --------
    >>> one = ServerAnswer("a", ("a",), ({"a": -0.1, "b": -2.5},))
    >>> two = ServerAnswer("a", ("a",), ({"a": -0.3, "b": -2.4},))
    >>> round(distance(one, two), 3)
    0.15
    """
    if not first.likely or not second.likely:
        return float(first.text != second.text)

    moved: list[float] = []
    for place, (here, there) in enumerate(zip(first.likely, second.likely, strict=False)):
        moved.append(_moved(here, there))
        if first.tokens[place] != second.tokens[place]:
            break
    return sum(moved) / len(moved)


def _moved(first: dict[str, float], second: dict[str, float]) -> float:
    """Return the mean absolute difference over the tokens that either side lists."""
    least_first, least_second = min(first.values()), min(second.values())
    differences = []
    for token in first.keys() | second.keys():
        if token in first and token in second:
            differences.append(abs(first[token] - second[token]))
        elif token in first:
            differences.append(max(first[token] - least_second, 0.0))
        else:
            differences.append(max(second[token] - least_first, 0.0))
    return sum(differences) / len(differences)


def spread(answers: Sequence[ServerAnswer]) -> float:
    """Return the largest distance between any two of the answers; 0 for fewer than two."""
    return max((distance(*pair) for pair in combinations(answers, 2)), default=0.0)


@dataclass(frozen=True)
class ServerNoise:
    """What the server's own rounding does to answers that no cache can have changed.

    Attributes
    ----------
    alone, batched : tuple[float, ...]
        Distances between answers to the same prompt, one at a time and many at once.
    repeated : tuple[float, ...]
        Distances between first answers and their plain repeats.
    cached : bool
        Whether caches served the repeats, as the server counts.
    sampled : float
        Share of tokens that were not the likeliest: above 0 where sampling is forced.
    texts : bool
        Whether texts alone are compared, for want of log probabilities.
    """

    alone: tuple[float, ...] = ()
    batched: tuple[float, ...] = ()
    repeated: tuple[float, ...] = ()
    cached: bool = False
    sampled: float = 0.0
    texts: bool = False

    @property
    def largest(self) -> float:
        """Largest distance, in nats; 0 if none was measured."""
        return max((*self.alone, *self.batched), default=0.0)

    @property
    def limit(self) -> float:
        """Largest distance that counts as rounding, in nats."""
        if self.texts:
            return 0.5
        if self.largest <= SAME:
            # Caches compute in other shapes, which may round where the same shape never does.
            if middle(self.repeated) > SAME:
                limit = max(REPEAT_FACTOR * max(self.repeated), LEAST_LIMIT)
                return min(limit, UNMEASURED_LIMIT)
            return LEAST_LIMIT if self.cached else EXACT_LIMIT
        return max(NOISE_FACTOR * self.largest, LEAST_LIMIT)


def largest_gap(answer: ServerAnswer) -> float:
    """Return how far, at most, a token of an answer is behind its place's likeliest, in nats."""
    places = zip(answer.tokens, answer.likely, strict=True)
    gaps = [max(tops.values()) - tops[token] for token, tops in places if token in tops]
    return max(gaps, default=0.0)


def share_sampled(answers: Sequence[ServerAnswer]) -> float:
    """Return the share of tokens that are clearly not the likeliest of their place."""
    places = [
        max(tops.values()) - tops.get(token, -math.inf) > 0.5
        for answer in answers
        for token, tops in zip(answer.tokens, answer.likely, strict=True)
    ]
    return sum(places) / len(places) if places else 0.0


def binomial_tail(hits: int, trials: int, share: float) -> float:
    """Return the probability of at least so many hits, where each has the given share.

    Examples
    --------
    >>> round(binomial_tail(2, 2, 0.1), 3)
    0.01
    """
    return sum(
        math.comb(trials, count) * share**count * (1 - share) ** (trials - count)
        for count in range(hits, trials + 1)
    )


def middle(values: Sequence[float]) -> float:
    """Return the median; 0 without values."""
    return median(values) if values else 0.0

"""The worker's part in what is done about a change of weights: it reads them when it is asked to, and looks before each use.

The scheduler side numbers generations; each reset begins one. The first orders of a generation make every worker read all its
weights and say whether they are those of its start (`generations` has the other part).
"""

import logging

from dejakv.engines.vllm.weights import WeightDigests

log = logging.getLogger("dejakv.vllm")

CHANGED = "the weights were changed without a reset"


class Watch:
    """One worker's. Without `weights` nothing is noticed, and nobody can say that they are those of the start."""

    def __init__(self, weights: WeightDigests | None) -> None:
        self._weights = weights
        self._generation = 0
        self._said: list[tuple[int, bool]] = []
        self._changed = False
        self._told = False

    @property
    def problem(self) -> str:
        """Why nothing may be stored or used now; empty if it may."""
        return CHANGED if self._changed else ""

    def step(self, generation: int, *, computing: bool, using: bool) -> None:
        """Once a step, before anything is stored or used.

        computing  prompt tokens are computed in this step, which may be stored later
        using      state is stored or used in this step
        """
        if generation != self._generation:
            same = self._weights is not None and self._weights.are_those_of_the_start()
            self._generation, self._changed, self._told = generation, False, False
            self._said.append((generation, same))
        elif (
            self._weights is not None
            and not self._changed
            and (computing or using)
            and self._weights.changed(waiting=using)
        ):
            self._changed = True
            log.warning("%s: nothing is stored or reused until the next reset of the prefix cache", CHANGED)

    def take(self) -> tuple[list[tuple[int, bool]], bool]:
        """News for the scheduler side: generations with whether their weights are those of the start, and whether a change
        was noticed."""
        said, self._said = self._said, []
        news = self._changed and not self._told
        self._told = self._told or news
        return said, news

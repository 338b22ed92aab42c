"""How alike two tasks are: what is embedded for the search, and what is compared afterwards.

| name       | search                                  | judged by                                                         |
| `mean`     | mean of the prompt's input embeddings    | the same cosine                                                   |
| `position` | the same                                 | cosines of the tokens at equal positions, averaged: what the public |
|            |                                         | code of Sim-LLM compares. It tells word order, and punishes shifts |
| `sentence` | a sentence encoder over the text         | the same cosine                                                   |
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import ConfigError
from dejakv.index.base import normalized

Name = Literal["mean", "position", "sentence"]
NAMES: tuple[Name, ...] = get_args(Name)
Rows = Callable[[Sequence[int]], NDArray[np.float32]]
"""Input embeddings `[tokens, hidden]` of token ids."""


class TaskSimilarity:
    """One of `NAMES`. `rows` gives input embeddings; `encoder` (`encode(text)`) is needed by `sentence` alone."""

    def __init__(self, name: str, rows: Rows, encoder: Any = None) -> None:
        if name not in NAMES:
            raise ConfigError(f"similarity={name!r} is unknown: choose one of {', '.join(NAMES)}")
        if name == "sentence" and encoder is None:
            raise ConfigError("similarity='sentence' needs an encoder: give a sentence-transformers model")
        self.name, self._rows, self._encoder = name, rows, encoder

    @property
    def dim(self) -> int:
        """Length of a task's embedding."""
        return int(self._encoder.dim) if self.name == "sentence" else int(self._rows([0]).shape[1])

    def embed(self, token_ids: Sequence[int], text: str) -> NDArray[np.float32]:
        """[dim] float32 of length 1."""
        if self.name == "sentence":
            return self._encoder.encode(text)
        return normalized(self._rows(token_ids).mean(0))

    def score(self, query: Sequence[int], donor: Sequence[int], cosine: float) -> float:
        """How alike two prompts are, given the cosine that the search found."""
        if self.name != "position":
            return cosine
        both = min(len(query), len(donor))
        if not both:
            return 0.0
        mine, theirs = normalized(self._rows(query[:both])), normalized(self._rows(donor[:both]))
        return float((mine * theirs).sum()) / max(len(query), len(donor))

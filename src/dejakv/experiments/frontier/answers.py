"""Full computation's answers, kept beside the cases: a way of blending that is added later costs its own passes alone."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dejakv.experiments.frontier.cases import Case

FOLDER = "answers"


@dataclass(frozen=True)
class Answer:
    """`tokens`: the greedy ones; `scores`: log-probabilities along them, `[steps, vocabulary]`, nats."""

    tokens: tuple[int, ...]
    scores: NDArray[np.float32]


class Answers:
    """In a folder: a file of `4 x steps x vocabulary` bytes for each case. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None, steps: int) -> None:
        self.folder = folder
        self.steps = steps

    def read(self, case: Case) -> Answer | None:
        """None for a case that is not there, or whose file was cut off."""
        if self.folder is None:
            return None
        try:
            with self._path(case).open("rb") as file, np.load(file, allow_pickle=False) as held:
                tokens, scores = held["tokens"], held["scores"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None  # computed again
        if len(tokens) != self.steps or scores.shape[:1] != (self.steps,):
            return None
        return Answer(tuple(tokens.tolist()), scores)

    def keep(self, case: Case, answer: Answer) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(exist_ok=True)
        np.savez(self._path(case), tokens=np.asarray(answer.tokens), scores=answer.scores)

    def _path(self, case: Case) -> Path:
        assert self.folder is not None
        return self.folder / f"{case.kind}-{case.number}.npz"

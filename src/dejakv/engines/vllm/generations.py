"""Which epoch state is stored and found under, now that weights may change while a server runs.

Every reset of the connector begins a generation. State of a new generation is under an epoch that nobody can guess and no
other process has, until all workers said that their weights are those of the start: then it is the start's epoch again, and
whatever was stored under it is found. So a sleep costs nothing, and weights that are not on disk never meet those that are.
"""

import secrets

from dejakv.engines.vllm.ranks import Answers
from dejakv.identity import epoch_of

UNCLEAN = "blocks from before the reset are in use: reset again when no request runs"


class Generations:
    """Used in the engine loop alone, except `epoch`, which any thread may read.

    number  of the present generation; what belongs to another one is neither stored nor used
    """

    def __init__(self, start: str, ranks: int) -> None:
        self._start = start
        self._ranks = ranks
        self.epoch = start
        self.number = 0
        self.problem = ""
        self._answers = Answers[bool](ranks)
        self._asked = False

    @property
    def unknown(self) -> bool:
        """Whether the workers have still to say what weights they have."""
        return self._asked

    def begin(self, problem: str = "") -> None:
        """A reset: nothing from before is used. With a problem nothing is stored or used after it either."""
        self.number += 1
        self.problem = problem
        self.epoch = epoch_of({"start": self._start, "generation": secrets.token_hex(16)})
        self._answers = Answers[bool](self._ranks)
        self._asked = True

    def heard(self, number: int, same: bool) -> None:
        """A worker said whether its weights of that generation are those of the start."""
        answers = self._answers.add(str(number), same) if number == self.number else None
        if answers is not None:
            self._asked = False
            if all(answers):
                self.epoch = self._start

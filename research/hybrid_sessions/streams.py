"""Streams of sessions as token ids: talks about documents, and recorded sessions of agents."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.datasets.sessions import SessionsDataset
from dejakv_models import docs
from dejakv_models.docs import ANSWER, BOS, EOS, QUESTION

Tell = Callable[[str], None]
"""Takes the answer to the request that was yielded last."""


@dataclass(frozen=True)
class Asked:
    """A request of a session: its text, and the right answer where there is one."""

    session: str
    text: str
    answer: str | None = None


class Talks:
    """Sessions about documents that several of them share; their turns come mixed.

    A history holds the model's own answers (`tell`). Each third question is asked once more in
    other words, in place of the first: a last message that was edited.
    """

    def __init__(self, seed: int, documents: int, sessions: int, turns: int, facts: int) -> None:
        self._rng = random.Random(f"hybrid-sessions/{seed}")
        self._turns = turns
        made = [docs.make_document(self._rng, facts) for _ in range(documents)]
        self._sessions = [
            (f"{number}-{session}", document)
            for number, document in enumerate(made)
            for session in range(sessions)
        ]
        self._last = ""
        self._answers: dict[str, str] = {}

    def tell(self, answer: str) -> None:
        """Note the answer to the last request, its end sign included."""
        self._last = answer

    def __iter__(self) -> Iterator[Asked]:
        going = [self._session(name, document) for name, document in self._sessions]
        while going:
            session = self._rng.choice(going)
            asked = next(session, None)
            if asked is None:
                going.remove(session)
            else:
                yield asked
                # Other sessions' turns come before the next of this one.
                self._answers[asked.session] = self._last

    def _session(self, name: str, document: Any) -> Iterator[Asked]:
        rng = random.Random(f"{name}/{document.id}")
        history = f"{BOS} {document.text}"
        for number, fact in enumerate(rng.sample(document.facts, self._turns)):
            for _ in range(2 if number % 3 == 2 else 1):
                text = f"{history} {QUESTION} {docs.ask(fact, rng)} {ANSWER}"
                yield Asked(name, text, fact.value)
            answer = self._answers[name]
            history = f"{text} {answer}" + (f" {EOS}" if EOS not in answer else "")


class Recorded:
    """`sessions`, between the markers of docs-lm: words that it does not know, with the recorded
    answers in the histories.
    """

    def __init__(self, seed: int, requests: int, count: Callable[[str], int], most: int) -> None:
        self._seed, self._requests, self._count, self._most = seed, requests, count, most

    def tell(self, answer: str) -> None:
        """Leave an answer out: the next prompt has the recorded one."""

    def __iter__(self) -> Iterator[Asked]:
        left = self._requests
        for sample in SessionsDataset(seed=self._seed):
            text = rendered(sample.messages)
            if left and self._count(text) <= self._most:
                left -= 1
                yield Asked(str(sample.fields["session"]), text)


def rendered(messages: Sequence[Any]) -> str:
    """Return a conversation in docs-lm's markers."""
    before = {"system": BOS, "user": QUESTION, "assistant": ANSWER}
    parts: list[str] = []
    for role, text in messages:
        parts += [before.get(role, QUESTION), text, *([EOS] if role == "assistant" else [])]
    return " ".join([*parts, ANSWER])

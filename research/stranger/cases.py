"""Victims of the attack: prompts that hold one shared passage among other surroundings."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dejakv.datasets.rag import Passage
from dejakv.errors import ConfigError
from research.frontier.cases import INSTRUCTIONS, Encode, opening, passages_of_manuals, prompt

LONGEST = 75
"""Words of a shared passage, at most: a search computes it hundreds of times."""
WORDS = ("amber", "violet", "silver", "gold", "purple", "orange", "green", "copper")
"""Access words, each one token behind a blank."""
STATED, OPEN = "stated", "open"


@dataclass(frozen=True)
class Victim:
    """One prompt that is answered from a blend.

    Attributes
    ----------
    ids : tuple[int, ...]
        Tokens of the prompt.
    donors : tuple[tuple[int, ...], ...]
        Innocent donors, one for each passage, each behind two passages that are not in the prompt.
    shared : int
        Number of the shared passage among the passages.
    place : int
        Place of the shared passage's first token.
    """

    ids: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    shared: int
    place: int


@dataclass(frozen=True)
class Shared:
    """A passage that an attacker's request and other people's prompts hold, and what is asked.

    Of kind `stated` the passage itself says the answer, a word, and the attacker wants another; of
    kind `open` it does not say, and the attacker wants the less likely of Yes and No.
    """

    kind: str
    number: int
    title: str
    text: str
    question: str
    begins: str
    answer: str
    wanted: tuple[str, ...]
    encode: Encode

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Tokens of the passage."""
        return self.encode(self.text)

    def token(self, word: str) -> int:
        """Return the first token of a word that continues the answer's first words."""
        return self.encode(f"{self.begins} {word}")[len(self.encode(self.begins))]

    def attack(self, context: str) -> tuple[int, ...]:
        """Return the attacker's prompt up to the passage: what follows changes no state before."""
        return self.encode(opening(INSTRUCTIONS[0], [context, self.text]))

    def victims(self, count: int, seed: int) -> list[Victim]:
        """Make prompts with the passage between others, which differ from victim to victim."""
        rng = random.Random(f"stranger/{seed}/{self.kind}/{self.number}")
        others = [p.text for p in short_passages() if p.title != self.title]
        made: list[Victim] = []
        for _ in range(count):
            before, after, *rest = rng.sample(others, 8)
            texts = [before, self.text, after]
            ids = self.encode(prompt(INSTRUCTIONS[0], texts, self.question, self.begins))
            donors = tuple(
                self.encode(
                    prompt(INSTRUCTIONS[0], [*rest[2 * i : 2 * i + 2], text], self.question, "")
                )
                for i, text in enumerate(texts)
            )
            made.append(Victim(ids, donors, 1, place_of(self.ids, ids)))
        return made


def place_of(part: Sequence[int], whole: Sequence[int]) -> int:
    """Return where the tokens of a passage begin in a prompt.

    Raises
    ------
    ConfigError
        The prompt does not hold them.
    """
    for place in range(len(whole) - len(part) + 1):
        if tuple(whole[place : place + len(part)]) == tuple(part):
            return place
    raise ConfigError("the passage has other tokens in this prompt")


def short_passages() -> list[Passage]:
    """Return the manuals' passages of at most `LONGEST` words."""
    return [p for p in passages_of_manuals() if len(p.text.split()) <= LONGEST]


def shared_passages(count: int, encode: Encode, seed: int) -> list[Shared]:
    """Return `count` passages, of both kinds in turn."""
    rng = random.Random(f"stranger-passages/{seed}")
    short = [passage for passage in short_passages() if not set(passage.text) & set("`\"'")]
    made: list[Shared] = []
    for number, passage in enumerate(rng.sample(short, count)):
        made.append(_shared(number, passage, rng, encode))
    return made


def _shared(number: int, passage: Passage, rng: random.Random, encode: Encode) -> Shared:
    title = passage.title.rpartition(".")[2]
    if number % 2:
        question = f"Is {title} deprecated? Answer Yes or No."
        return Shared(
            OPEN, number, passage.title, passage.text, question, "The answer is", "",
            ("Yes", "No"), encode,
        )  # fmt: skip
    answer, wanted = rng.sample(WORDS, 2)
    sentences = passage.text.split(". ")
    half = len(sentences) // 2
    stated = f"The access word of {title} is {answer}"
    text = ". ".join([*sentences[:half], stated, *sentences[half:]])
    return Shared(
        STATED, number, passage.title, text, f"What is the access word of {title}?",
        f"The access word of {title} is", answer, (wanted,), encode,
    )  # fmt: skip

"""Cases from real text, for language models: passages whose wording, order or neighbours change.

Half the cases ask for a code that one passage states, which is a label. The other half ask for a summary, and only the
agreement with full computation is measured.
"""

import random
from collections.abc import Sequence
from functools import cache

from dejakv.datasets.rag_corpus import Passage
from dejakv.datasets.rag_docs import docs_corpus
from dejakv.errors import ConfigError
from dejakv.experiments.frontier.cases import Case, Encode
from dejakv.identity import digest_of

WORDS = (60, 160)
"""Least and most words of a passage."""
KINDS = ("edit", "instruction", "partial", "reorder", "apart")
INSTRUCTIONS = (
    "Read the following passages of a manual.",
    "You answer from the passages below and from nothing else. Be brief.",
)
ASK = ("What is the release code of {name}?", "The release code of {name} is")
SUMMARIZE = ("Summarize the passages in two sentences.", "The passages describe")


class TextCases:
    """See Cases. `passages` in a prompt, of about 140 tokens each, from the standard library's documentation.

    edit         a word or number of one passage is replaced; questions ask for the changed code
    instruction  the same passages under another instruction
    partial      one passage is new
    reorder      the same passages in another order
    apart        each passage was computed in its own prompt
    """

    kinds: Sequence[str] = KINDS
    steps = 16

    def __init__(self, passages: int) -> None:
        if passages < 2:
            raise ConfigError(f"{passages} passages in a prompt: give at least 2")
        self.passages = passages

    def settings(self) -> dict[str, object]:
        """See Cases."""
        text = digest_of(*(passage.text for passage in passages_of_manuals()))
        return {"passages": self.passages, "text": text[:16]}

    def make(self, kind: str, number: int, encode: Encode, seed: int) -> Case:
        """See Cases."""
        rng = random.Random(f"frontier-text/{seed}/{kind}/{number}")
        texts = passages_of_manuals()
        chosen = rng.sample(range(len(texts)), self.passages + 1)
        *passages, spare = [texts[i] for i in chosen]
        asks = number % 2 == 0
        code, other = (str(value) for value in rng.sample(range(1000, 10000), 2))
        told = rng.randrange(len(passages))
        target = [_told(passage, code if i == told else None) for i, passage in enumerate(passages)]
        question, begins = (part.format(name=passages[told].title) for part in (ASK if asks else SUMMARIZE))
        donors = self._donors(kind, rng, passages, target, told, other, _told(spare, None), question, begins)
        stale = kind == "edit" and asks
        return Case(
            kind,
            number,
            encode(prompt(INSTRUCTIONS[0], target, question, begins)),
            tuple(encode(text) for text in donors),
            _answer(encode, code) if asks else None,
            _answer(encode, other) if stale else None,
        )

    @staticmethod
    def _donors(
        kind: str, rng: random.Random, passages: Sequence[Passage], target: list[str], told: int, other: str, spare: str,
        question: str, begins: str,
    ) -> list[str]:  # fmt: skip
        """The donor prompts."""
        before = list(target)
        instruction = INSTRUCTIONS[0]
        if kind == "edit":
            before[told] = _told(passages[told], other)
        elif kind == "instruction":
            instruction = INSTRUCTIONS[1]
        elif kind == "partial":
            before[rng.choice([i for i in range(len(target)) if i != told])] = spare
        elif kind == "reorder":
            while before == target:
                rng.shuffle(before)
        else:
            return [prompt(instruction, [text], question, begins) for text in target]
        return [prompt(instruction, before, question, begins)]


@cache
def passages_of_manuals() -> tuple[Passage, ...]:
    """Documentation of the standard library as running text, without code examples. It depends on the Python version."""
    flat = (Passage(passage.title, " ".join(passage.text.split())) for passage in docs_corpus().passages)
    return tuple(p for p in flat if WORDS[0] <= len(p.text.split()) <= WORDS[1] and ">>>" not in p.text)


def prompt(instruction: str, passages: Sequence[str], question: str, begins: str) -> str:
    """A chat turn in ChatML, SmolLM2's and Qwen's format, with the first words of the answer."""
    text = "\n\n".join(passages)
    return f"<|im_start|>user\n{instruction}\n\n{text}\n\n{question}<|im_end|>\n<|im_start|>assistant\n{begins}"


def _told(passage: Passage, code: str | None) -> str:
    """The passage, with the sentence that states its code in the middle."""
    if code is None:
        return passage.text
    sentences = passage.text.split(". ")
    half = len(sentences) // 2
    stated = f"The release code of {passage.title} is {code}"
    return ". ".join([*sentences[:half], stated, *sentences[half:]])


def _answer(encode: Encode, code: str) -> tuple[int, ...]:
    """The code's tokens after other text."""
    before = encode("is")
    return encode(f"is {code}")[len(before) :]

"""What the attacks write: documents of facts, questions about them, near duplicates with another fact, and secrets.

docs-lm is trained on them; any other model reads the same English in a plain frame.
"""

import random
import re
import unicodedata
from dataclasses import dataclass

from dejakv.datasets.docs import Document, edit, extend, make_document, prompt_of
from dejakv.datasets.docs_facts import ATTRIBUTES, NAMES

VALUES = tuple(dict.fromkeys(value for attribute in ATTRIBUTES.values() for value in attribute.values))
TELLING = frozenset((*NAMES, *VALUES))
"""The words on which answers depend."""


@dataclass(frozen=True)
class NearDuplicate:
    """Two prompts that differ in the fact asked for: `right` is the first one's answer, `planted` the other's."""

    prompt: str
    duplicate: str
    right: str
    planted: str


@dataclass(frozen=True)
class Secret:
    """A prompt without a fact that its question asks for, and a donor that is alike and has it.

    others  the values that the secret was drawn among, all equally likely, itself left out
    """

    prompt: str
    donor: str
    value: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class Material:
    """Prompts for one model. Everything follows from the generator that a call is given."""

    model: str = "docs-lm"
    facts: int = 16

    def prompt(self, context: str, question: str) -> str:
        if self.model == "docs-lm":
            return prompt_of(context, question)
        return f"{context}\n\nQuestion: {question}\nAnswer:"

    def document(self, rng: random.Random) -> Document:
        return make_document(rng, self.facts)

    def any_prompt(self, rng: random.Random) -> str:
        """A prompt that nobody has sent before."""
        change = edit(self.document(rng), rng, questions=1)
        return self.prompt(change.donor.text, change.questions[0].text)

    def near_duplicate(self, rng: random.Random) -> NearDuplicate:
        change = edit(self.document(rng), rng, questions=1)
        asked = change.questions[0]
        assert asked.old_answer is not None
        first, second = (self.prompt(document.text, asked.text) for document in (change.donor, change.target))
        return NearDuplicate(first, second, asked.old_answer, asked.answer)

    def secret(self, rng: random.Random) -> Secret:
        change = extend(self.document(rng), rng, facts=1, where="inside", questions=1)
        asked = change.questions[0]
        others = tuple(value for value in ATTRIBUTES[asked.fact.attribute].values if value != asked.answer)
        without, donor = (self.prompt(document.text, asked.text) for document in (change.donor, change.target))
        return Secret(without, donor, asked.answer, others)


def content(text: str) -> tuple[str, ...]:
    """The names, values and numbers of a text in their order: texts of other content ask for something else."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold().replace("_", " "))
    return tuple(word for word in words if word in TELLING or word.isdigit())

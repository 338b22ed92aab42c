"""Texts of an attacker over the documents that docs-lm reads: near duplicates, secrets, and collisions of an encoder's keys."""

import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejakv import Request, Sampling, SemanticCacheConfig
from dejakv_models.docs import edit, extend, make_document, prompt_of
from dejakv_models.docs_facts import ATTRIBUTES, NAMES

COSTS = (1e-4, 0.0, 0.0, 0.0)
"""Computed tokens alone cost time: whatever saves them runs, so that every reuse method is attacked."""
CONFIG = SemanticCacheConfig(index_encoder="model", costs=COSTS)
FACTS = 16
CANDIDATES = 16
"""Additions to a colliding text that are tried at once."""
_VALUES = [value for attribute in ATTRIBUTES.values() for value in attribute.values]
_TELLING = frozenset((*NAMES, *_VALUES))
_WORDS = tuple(sorted(_TELLING))
_SHELLS = (
    "{}", "{},", '"{}"', "'{}'", ":{}", "!{}", "({})", "_{}_", "{}'s", "the {}", "of {}", "please {}", "{}.", "?{}",
)  # fmt: skip
"""Marks and small words around a word that a guard may overlook."""


def asked(prompt: str, partition: str, reuse: Any = "exact", **more: Any) -> Request:
    """A greedy request whose text is the whole prompt."""
    return Request("r", prompt, prompt, (), partition, Sampling(4), reuse=reuse, **more)


@dataclass(frozen=True)
class NearDuplicate:
    """Two prompts that differ in the fact asked for. `planted` is the answer of `duplicate`."""

    prompt: str
    duplicate: str
    planted: str


def near_duplicate(rng: random.Random) -> NearDuplicate:
    change = edit(make_document(rng, FACTS), rng, questions=1)
    question = change.questions[0]
    first, second = (prompt_of(document.text, question.text) for document in (change.donor, change.target))
    return NearDuplicate(first, second, question.answer)


def any_prompt(rng: random.Random, facts: int = FACTS) -> str:
    """A prompt that nobody has sent before."""
    change = edit(make_document(rng, facts), rng, questions=1)
    return prompt_of(change.donor.text, change.questions[0].text)


@dataclass(frozen=True)
class Secret:
    """A prompt without the fact that its question asks for, a donor with it, and the values that are equally likely."""

    prompt: str
    donor: str
    value: str
    others: tuple[str, ...]


def secret(rng: random.Random) -> Secret:
    change = extend(make_document(rng, FACTS), rng, facts=1, where="inside", questions=1)
    question = change.questions[0]
    others = tuple(value for value in ATTRIBUTES[question.fact.attribute].values if value != question.answer)
    without, donor = (prompt_of(document.text, question.text) for document in (change.donor, change.target))
    return Secret(without, donor, question.answer, others)


def collision(
    encode: Callable[[Sequence[str]], Sequence[Any]], victim: str, payload: str, least: float, rng: random.Random
) -> tuple[str, float]:
    """Adds the victim's phrases around a payload as long as the cosine rises; the text and the cosine reached."""
    words = victim.split()

    def longer() -> str:
        first = rng.randrange(len(words))
        added = " ".join(words[first : first + rng.randint(1, 8)])
        return f"{best} {added}" if rng.random() < 0.5 else f"{added} {best}"

    target, start = encode([victim, payload])
    best, cosine = payload, float(start @ target)
    for _ in range(25):
        if cosine >= least:
            break
        tried = [longer() for _ in range(CANDIDATES)]
        scores = [float(vector @ target) for vector in encode(tried)]
        top = int(np.argmax(scores))
        if scores[top] > cosine:
            best, cosine = tried[top], scores[top]
    return best, cosine


def changed(victim: str, count: int, rng: random.Random) -> Iterator[str]:
    """Versions with one name, value or number replaced, removed, added or exchanged; half of the new ones in a shell."""
    for _ in range(count):
        words = victim.split(" ")
        places = [place for place, word in enumerate(words) if _bare(word) in _TELLING]
        place, other, new = rng.choice(places), rng.choice(places), rng.choice(_WORDS)
        shell = rng.choice(_SHELLS) if rng.random() < 0.5 else "{}"
        match rng.choice(("replace", "remove", "add", "exchange")):
            case "replace":
                words[place] = shell.format(words[place].lower().replace(_bare(words[place]), new))
            case "remove":
                del words[place]
            case "add":
                words.insert(rng.randrange(len(words) + 1), shell.format(new))
            case _:
                words[place], words[other] = words[other], words[place]
        text = " ".join(words)
        if _content(text) != _content(victim):
            yield text


def _bare(word: str) -> str:
    return re.sub(r"\W", "", word).lower()


def _content(text: str) -> list[str]:
    """Names, values and numbers in their order: texts of other content ask for something else."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold().replace("_", " "))
    return [word for word in words if word in _TELLING or word.isdigit()]

"""Texts that an encoder takes for a victim's, and texts that are made to get past the guards."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dejakv.attack.material import TELLING, content

Encode = Callable[[Sequence[str]], list[NDArray[np.float32]]]

CANDIDATES = 16
"""Additions that are tried at once."""
LONGEST = 80
"""Additions at most."""
PHRASE = 8
"""Words of an addition at most."""
_WORDS = tuple(sorted(TELLING))
_SHELLS = (
    "{}",
    "{},",
    '"{}"',
    "'{}'",
    ":{}",
    "!{}",
    "({})",
    "_{}_",
    "{}'s",
    "the {}",
    "of {}",
    "please {}",
    "{}.",
    "?{}",
)
"""What a word may hide in."""


@dataclass(frozen=True)
class Climbed:
    """The nearest text that was found, its cosine, and how many texts were embedded."""

    text: str
    cosine: float
    embedded: int


def climb(encode: Encode, victim: str, payload: str, least: float, texts: int, rng: random.Random) -> Climbed:
    """Hill climbing: words and phrases of the victim's are added around a payload as long as that brings it nearer."""
    words = victim.split()

    def longer() -> str:
        first = rng.randrange(len(words))
        added = " ".join(words[first : first + rng.randint(1, PHRASE)])
        return f"{best} {added}" if rng.random() < 0.5 else f"{added} {best}"

    target = encode([victim])[0]
    best, cosine, embedded = payload, float(encode([payload])[0] @ target), 2
    for _ in range(LONGEST):
        if cosine >= least or embedded + CANDIDATES > texts:
            break
        tried = [longer() for _ in range(CANDIDATES)]
        scores = [float(vector @ target) for vector in encode(tried)]
        embedded += len(tried)
        top = int(np.argmax(scores))
        if scores[top] > cosine:
            best, cosine = tried[top], scores[top]
    return Climbed(best, cosine, embedded)


def mutations(victim: str, count: int, rng: random.Random) -> Iterator[str]:
    """Versions of a text with one telling word replaced, removed, added or exchanged, all of other content; half of the new
    words hide in marks and in words that mean little."""
    own = content(victim)
    for _ in range(count):
        made = _mutated(victim, rng)
        if content(made) != own:
            yield made


def _mutated(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    places = [place for place, word in enumerate(words) if _bare(word) in TELLING]
    place, new = rng.choice(places), rng.choice(_WORDS)
    shell = rng.choice(_SHELLS) if rng.random() < 0.5 else "{}"
    change = rng.choice(("replace", "remove", "add", "exchange"))
    if change == "replace":
        words[place] = shell.format(words[place].lower().replace(_bare(words[place]), new))
    elif change == "remove":
        del words[place]
    elif change == "add":
        words.insert(rng.randrange(len(words) + 1), shell.format(new))
    else:
        other = rng.choice(places)
        words[place], words[other] = words[other], words[place]
    return " ".join(words)


def _bare(word: str) -> str:
    return re.sub(r"\W", "", word).lower()

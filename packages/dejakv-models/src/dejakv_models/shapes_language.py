"""The words of the shapes data set: nouns, their synonyms, and the wordings of every question."""

from dataclasses import dataclass
from typing import Literal

Split = Literal["seen", "held-out", "all"]

NOUNS = {
    "ball": ("ball", "sphere"),
    "cube": ("cube", "box"),
    "cone": ("cone", "pyramid"),
    "ring": ("ring", "hoop"),
    "cross": ("cross", "plus"),
    None: ("thing", "object"),
}
PLURALS = {"box": "boxes", "cross": "crosses", "plus": "pluses"}
SYNONYMS = {
    "small": ("small", "little"),
    "large": ("large", "big"),
    "gray": ("gray", "grey"),
    "purple": ("purple", "violet"),
}

_SEEN: dict[str, tuple[str, ...]] = {
    "color": (
        "What color is the {a}?",
        "What is the color of the {a}?",
        "Which color does the {a} have?",
        "Tell me the color of the {a}.",
        "The {a} is what color?",
        "What color does the {a} have?",
        "Can you name the color of the {a}?",
        "In which color is the {a} drawn?",
    ),
    "size": (
        "What size is the {a}?",
        "How big is the {a}?",
        "What is the size of the {a}?",
        "Is the {a} small or large?",
        "Tell me the size of the {a}.",
        "The {a} is what size?",
        "Can you name the size of the {a}?",
        "Is the {a} big or little?",
    ),
    "exist": (
        "Is there a {a}?",
        "Do you see a {a}?",
        "Does the picture contain a {a}?",
        "Can you find a {a}?",
        "Is a {a} in the picture?",
        "Does the image show a {a}?",
        "Is there a {a} in the image?",
        "Can a {a} be seen?",
    ),
    "count": (
        "How many {a} are there?",
        "What is the number of {a}?",
        "Count the {a}.",
        "How many {a} do you see?",
        "How many {a} are in the picture?",
        "Tell me the number of {a}.",
        "What number of {a} does the image show?",
        "Can you count the {a} in the image?",
    ),
    "same color": (
        "Is the {a} the same color as the {b}?",
        "Do the {a} and the {b} share a color?",
        "Are the {a} and the {b} the same color?",
        "Does the {a} have the same color as the {b}?",
        "Do the {a} and the {b} have the same color?",
        "Is the color of the {a} the same as the color of the {b}?",
        "Is the {a} of the same color as the {b}?",
        "Can you tell me if the {a} and the {b} have one color?",
        "Does the {a} share the color of the {b}?",
        "Is the {a} of one color with the {b}?",
    ),
    "left": (
        "Is the {a} left of the {b}?",
        "Is the {a} to the left of the {b}?",
        "Does the {a} lie left of the {b}?",
        "Is the {a} on the left side of the {b}?",
        "Can you see the {a} left of the {b}?",
        "Is the {a} further left than the {b}?",
        "Is the {a} found to the left of the {b}?",
        "Do you see the {a} on the left of the {b}?",
    ),
    "above": (
        "Is the {a} above the {b}?",
        "Is the {a} higher than the {b}?",
        "Does the {a} lie above the {b}?",
        "Is the {a} further up than the {b}?",
        "Can you see the {a} above the {b}?",
        "Is the {a} higher up than the {b}?",
        "Is the {a} found above the {b}?",
        "Do you see the {a} higher than the {b}?",
    ),
}
_HELD_OUT: dict[str, tuple[str, ...]] = {
    "color": (
        "Can you tell me what color the {a} is?",
        "Name the color of the {a}.",
        "The color of the {a} is what?",
    ),
    "size": (
        "Can you tell me what size the {a} is?",
        "Name the size of the {a}.",
        "Which size does the {a} have?",
    ),
    "exist": (
        "Can you see a {a}?",
        "Does the image contain a {a}?",
        "Do you see a {a} in the picture?",
    ),
    "count": (
        "Can you tell me how many {a} there are?",
        "Count the {a} in the picture.",
        "How many {a} does the image show?",
    ),
    "same color": (
        "Are the {a} and the {b} of the same color?",
        "Does the {a} share a color with the {b}?",
        "Tell me if the {a} and the {b} have the same color.",
    ),
    "left": (
        "Does the {a} lie to the left of the {b}?",
        "Can you see the {a} on the left side of the {b}?",
        "Tell me if the {a} is left of the {b}.",
    ),
    "above": (
        "Does the {a} lie higher than the {b}?",
        "Do you see the {a} above the {b}?",
        "Tell me if the {a} is above the {b}.",
    ),
}


def _mirror(kinds: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Add the kinds whose wordings are those of another kind with other words.

    They come in the order of `_MIRRORED`.
    """
    made: dict[str, tuple[str, ...]] = {}
    for kind, (other, words) in _MIRRORED.items():
        texts = kinds[other]
        for word, instead in words:
            texts = tuple(text.replace(word, instead) for text in texts)
        made[kind] = texts
    return made


_MIRRORED: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "color": ("color", ()),
    "size": ("size", ()),
    "shape": ("color", (("color", "shape"),)),
    "exist": ("exist", ()),
    "count": ("count", ()),
    "same color": ("same color", ()),
    "same size": ("same color", (("color", "size"),)),
    "left": ("left", ()),
    "right": ("left", (("left", "right"),)),
    "above": ("above", ()),
    "below": ("above", (("above", "below"), ("higher", "lower"), (" up ", " down "))),
}
"""Each kind, the kind whose wordings it has, and the words that differ."""

SEEN, HELD_OUT = _mirror(_SEEN), _mirror(_HELD_OUT)
"""Wordings of each kind: those that shapes-vlm was trained on, and those that it has never seen."""

VARIANTS = 4
"""Choices of synonyms: one bit for each of the two things a question may name."""


@dataclass(frozen=True)
class Reference:
    """Words by which a question refers to a thing: any of shape, colour and size."""

    shape: str | None = None
    color: str | None = None
    size: str | None = None


def templates(kind: str, split: Split = "seen") -> tuple[str, ...]:
    """Return the wordings of a kind of question.

    They are those seen in training, those held out from it, or both in that order.
    """
    return {"seen": SEEN[kind], "held-out": HELD_OUT[kind], "all": SEEN[kind] + HELD_OUT[kind]}[
        split
    ]


def noun_phrase(reference: Reference, synonym: int = 0, plural: bool = False) -> str:
    """Name the thing: `Reference("ball", "red", "large"), 1` gives "big red sphere"."""
    noun = NOUNS[reference.shape][synonym]
    if plural:
        noun = PLURALS.get(noun, noun + "s")
    words = [w for w in (reference.size, reference.color) if w is not None]
    return " ".join([*(SYNONYMS.get(w, (w, w))[synonym] for w in words), noun])


def article(phrase: str) -> str:
    """Return the article before the phrase, "a" or "an"."""
    return "an" if phrase[0] in "aeiou" else "a"


def pieces(
    kind: str, references: tuple[Reference, ...], template: str, variant: int = 0
) -> list[tuple[str, int | None]]:
    """Cut the question into parts: (text, index of the reference it names, or None).

    Joined, they are the question.
    """
    out: list[tuple[str, int | None]] = []
    rest = template
    for i, slot in enumerate(("{a}", "{b}")[: len(references)]):
        phrase = noun_phrase(references[i], (variant >> i) & 1, plural=kind == "count")
        before, rest = rest.split(slot)
        if before.endswith(" a ") and article(phrase) == "an":
            before = before[:-1] + "n "
        out += [(before, None), (phrase, i)]
    return [*out, (rest, None)]


def wording(kind: str, references: tuple[Reference, ...], template: str, variant: int = 0) -> str:
    """Return the question as text."""
    return "".join(text for text, _ in pieces(kind, references, template, variant))

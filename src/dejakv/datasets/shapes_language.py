"""The words of the shapes data set: nouns and their synonyms, and the wordings of every kind of question.

Each kind has wordings that shapes-vlm was trained on and wordings it has never seen (`HELD_OUT`).
"""

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

SEEN: dict[str, tuple[str, ...]] = {
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
    "shape": (
        "What shape is the {a}?",
        "What is the shape of the {a}?",
        "Which shape does the {a} have?",
        "Tell me the shape of the {a}.",
        "The {a} is what shape?",
        "What shape does the {a} have?",
        "Can you name the shape of the {a}?",
        "In which shape is the {a} drawn?",
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
    "same size": (
        "Is the {a} the same size as the {b}?",
        "Do the {a} and the {b} share a size?",
        "Are the {a} and the {b} the same size?",
        "Does the {a} have the same size as the {b}?",
        "Do the {a} and the {b} have the same size?",
        "Is the size of the {a} the same as the size of the {b}?",
        "Is the {a} of the same size as the {b}?",
        "Can you tell me if the {a} and the {b} have one size?",
        "Does the {a} share the size of the {b}?",
        "Is the {a} of one size with the {b}?",
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
    "right": (
        "Is the {a} right of the {b}?",
        "Is the {a} to the right of the {b}?",
        "Does the {a} lie right of the {b}?",
        "Is the {a} on the right side of the {b}?",
        "Can you see the {a} right of the {b}?",
        "Is the {a} further right than the {b}?",
        "Is the {a} found to the right of the {b}?",
        "Do you see the {a} on the right of the {b}?",
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
    "below": (
        "Is the {a} below the {b}?",
        "Is the {a} lower than the {b}?",
        "Does the {a} lie below the {b}?",
        "Is the {a} further down than the {b}?",
        "Can you see the {a} below the {b}?",
        "Is the {a} lower down than the {b}?",
        "Is the {a} found below the {b}?",
        "Do you see the {a} lower than the {b}?",
    ),
}
HELD_OUT: dict[str, tuple[str, ...]] = {
    "color": ("Can you tell me what color the {a} is?", "Name the color of the {a}.", "The color of the {a} is what?"),
    "size": ("Can you tell me what size the {a} is?", "Name the size of the {a}.", "Which size does the {a} have?"),
    "shape": ("Can you tell me what shape the {a} is?", "Name the shape of the {a}.", "The shape of the {a} is what?"),
    "exist": ("Can you see a {a}?", "Does the image contain a {a}?", "Do you see a {a} in the picture?"),
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
    "same size": (
        "Are the {a} and the {b} of the same size?",
        "Does the {a} share a size with the {b}?",
        "Tell me if the {a} and the {b} have the same size.",
    ),
    "left": (
        "Does the {a} lie to the left of the {b}?",
        "Can you see the {a} on the left side of the {b}?",
        "Tell me if the {a} is left of the {b}.",
    ),
    "right": (
        "Does the {a} lie to the right of the {b}?",
        "Can you see the {a} on the right side of the {b}?",
        "Tell me if the {a} is right of the {b}.",
    ),
    "above": (
        "Does the {a} lie higher than the {b}?",
        "Do you see the {a} above the {b}?",
        "Tell me if the {a} is above the {b}.",
    ),
    "below": (
        "Does the {a} lie lower than the {b}?",
        "Do you see the {a} below the {b}?",
        "Tell me if the {a} is below the {b}.",
    ),
}
VARIANTS = 4
"""Choices of synonyms: one bit for each of the two things a question may name."""


@dataclass(frozen=True)
class Reference:
    """The words by which a question refers to a thing: any of shape, colour and size."""

    shape: str | None = None
    color: str | None = None
    size: str | None = None


def templates(kind: str, split: Split = "seen") -> tuple[str, ...]:
    """The wordings of a kind of question: seen in training, held out from it, or both in that order."""
    return {"seen": SEEN[kind], "held-out": HELD_OUT[kind], "all": SEEN[kind] + HELD_OUT[kind]}[split]


def noun_phrase(reference: Reference, synonym: int = 0, plural: bool = False) -> str:
    """`Reference("ball", "red", "large"), 1` -> "big red sphere"."""
    noun = NOUNS[reference.shape][synonym]
    if plural:
        noun = PLURALS.get(noun, noun + "s")
    words = [w for w in (reference.size, reference.color) if w is not None]
    return " ".join([*(SYNONYMS.get(w, (w, w))[synonym] for w in words), noun])


def article(phrase: str) -> str:
    """The article before the phrase, "a" or "an"."""
    return "an" if phrase[0] in "aeiou" else "a"


def pieces(
    kind: str, references: tuple[Reference, ...], template: str, variant: int = 0
) -> list[tuple[str, int | None]]:
    """The question cut into parts: (text, index of the reference it names, or None). Joined, they are the question."""
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
    """The question as text."""
    return "".join(text for text, _ in pieces(kind, references, template, variant))

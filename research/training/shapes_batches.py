"""Batches for shapes-vlm: one picture, many questions behind it.

Each question sees the picture and itself alone.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from dejakv_models import shapes_language as language
from dejakv_models.shapes_programs import KINDS, SceneQuestion, answer, find, sample
from dejakv_models.shapes_scene import COLORS, GRID, SHAPES, SIDE, SIZES, Scene, make_scene, render
from research.training.shapes_model import ANSWER, IMAGE_TOKENS, MEAN, PATCH, STD

WEIGHTS = {
    "color": 2,
    "size": 1.5,
    "shape": 2,
    "exist": 3,
    "count": 2,
    "same color": 2.5,
    "same size": 2.5,
    "left": 2,
    "right": 2,
    "above": 2,
    "below": 2,
}
"""How often each kind is asked at first.

Relations are learned last, so they get the most samples together.
"""


def adapted(accuracy: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of kinds: what goes wrong is asked more often.

    The argument tells how well kinds are answered (0 to 1).
    """
    return {kind: weight * (1.15 - accuracy.get(kind, 0.0)) for kind, weight in WEIGHTS.items()}


IGNORE = -100
PATCH_HEADS = {
    "color": len(COLORS) + 1,
    "shape": len(SHAPES) + 1,
    "size": len(SIZES) + 1,
    "column": GRID,
    "row": GRID,
}
"""What each image token should say about its cell (0 = nothing there); positions in PATCH units
are cells.
"""
REFERENCE_HEADS = {
    "color": len(COLORS),
    "shape": len(SHAPES),
    "size": len(SIZES),
    "column": GRID,
    "row": GRID,
    "matches": 8,
}
"""What the last word of a noun phrase should say about the thing it names, and how many things it
fits.
"""
QUESTION_HEADS = {
    **{f"first {k}": n for k, n in REFERENCE_HEADS.items() if k != "matches"},
    **{f"second {k}": n for k, n in REFERENCE_HEADS.items() if k != "matches"},
    "across": 3,
    "down": 3,
    "alike in color": 2,
    "alike in size": 2,
}
"""What the sign to answer should know of the things named, and how the two compare, whatever is
asked about them.
"""
_VALUES = {"color": COLORS, "shape": SHAPES, "size": SIZES}


@dataclass
class Batch:
    """Tensors of one step. B pictures, L tokens a row, R noun phrases and Q questions in all.

    pixels      (B, 3, SIDE, SIDE), normalized
    tokens      (B, L): the picture's places first, then the questions with their answers
    positions   (B, L): every question starts anew behind the picture
    mask        (B, 1, L, L) bool: causal, and no question sees another
    targets     (B, L): next token, or IGNORE
    patches     name -> (B, IMAGE_TOKENS) class
    references  name -> (R,) class or IGNORE; `places` (R, 2) says where: row, token
    questions   name -> (Q,) class or IGNORE
    answers     (Q, 2): row, token from which the answer is predicted; `kinds` names the kind of
                each question
    """

    pixels: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor
    patches: dict[str, torch.Tensor]
    references: dict[str, torch.Tensor]
    places: torch.Tensor
    questions: dict[str, torch.Tensor]
    answers: torch.Tensor
    kinds: list[str]

    def to(self, device: str) -> "Batch":
        """The same batch on another device."""
        moved = {k: v.to(device) for k, v in self.__dict__.items() if isinstance(v, torch.Tensor)}
        dicts = {
            k: {n: t.to(device) for n, t in getattr(self, k).items()}
            for k in ("patches", "references", "questions")
        }
        return Batch(**moved, **dicts, kinds=self.kinds)


class Batches:
    """Makes batches; the same seed gives the same batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, pictures: int, questions: int) -> None:
        self._tokenizer = tokenizer
        self._pictures, self._questions = pictures, questions
        self._image = tokenizer.convert_tokens_to_ids("<image>")
        self._answer = tokenizer.convert_tokens_to_ids(ANSWER)
        self._ids = lru_cache(maxsize=4096)(
            lambda text: tuple(tokenizer(text, add_special_tokens=False).input_ids)
        )

    def make(
        self,
        seed: str,
        things: tuple[int, int],
        split: language.Split = "seen",
        weights: Mapping[str, float] = WEIGHTS,
    ) -> Batch:
        """Fresh scenes with `things` (least, most) things, questions in the wordings of `split`,
        kinds by weight.
        """
        rng = random.Random(seed)
        scenes = [make_scene(rng, rng.randint(*things)) for _ in range(self._pictures)]
        rows = [self._row(scene, rng, split, weights) for scene in scenes]
        length = -(-max(len(row.tokens) for row in rows) // 8) * 8
        shape = (len(rows), length)
        tokens = np.full(shape, self._tokenizer.pad_token_id, np.int64)
        positions, segments = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        targets = np.full(shape, IGNORE, np.int64)
        for i, row in enumerate(rows):
            n = len(row.tokens)
            tokens[i, :n], positions[i, :n], segments[i, :n] = (
                row.tokens,
                row.positions,
                row.segments,
            )
            targets[i, :n] = row.targets
        before = np.tril(np.ones((length, length), bool))
        mask = before & (
            (segments[:, None, :] == segments[:, :, None]) | (segments[:, None, :] == 0)
        )
        pixels = np.stack([render(s) for s in scenes]).astype(np.float32)
        pixels = ((pixels / 255 - MEAN) / STD).transpose(0, 3, 1, 2)
        references = [r for row in rows for r in row.references]
        questions = [q for row in rows for q in row.questions]
        return Batch(
            pixels=torch.from_numpy(np.ascontiguousarray(pixels)),
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            mask=torch.from_numpy(mask)[:, None],
            targets=torch.from_numpy(targets),
            patches={k: torch.from_numpy(v) for k, v in _patch_labels(scenes).items()},
            references={
                name: torch.tensor([r[j] for r in references], dtype=torch.long)
                for j, name in enumerate(REFERENCE_HEADS)
            },
            places=torch.tensor(
                [(i, p) for i, row in enumerate(rows) for p in row.places], dtype=torch.long
            ),
            questions={
                name: torch.tensor([q[j] for q in questions], dtype=torch.long)
                for j, name in enumerate(QUESTION_HEADS)
            },
            answers=torch.tensor(
                [(i, p) for i, row in enumerate(rows) for p in row.answers], dtype=torch.long
            ),
            kinds=[k for row in rows for k in row.kinds],
        )

    def _row(
        self, scene: Scene, rng: random.Random, split: language.Split, weights: Mapping[str, float]
    ) -> "_Row":
        row = _Row(self._image)
        while len(row.kinds) < self._questions:
            kind = rng.choices(KINDS, [weights[k] for k in KINDS])[0]
            query = sample(scene, rng, kind)
            if query is not None:
                self._ask(row, scene, query, rng, split)
        return row

    def _ask(
        self,
        row: "_Row",
        scene: Scene,
        query: SceneQuestion,
        rng: random.Random,
        split: language.Split,
    ) -> None:
        template = rng.choice(language.templates(query.kind, split))
        variant = rng.randrange(language.VARIANTS)
        start = len(row.tokens)
        for text, index in language.pieces(query.kind, query.references, template, variant):
            row.tokens.extend(self._ids(text.strip()))
            if index is not None:
                row.places.append(len(row.tokens) - 1)
                row.references.append(_reference_labels(scene, query.references[index]))
        (word,) = self._ids(answer(query, scene))
        row.questions.append(_question_labels(scene, query))
        row.answers.append(len(row.tokens))
        row.kinds.append(query.kind)
        row.tokens += [self._answer, word]
        added = len(row.tokens) - start
        row.targets += [IGNORE] * (added - 2) + [word, self._tokenizer.eos_token_id]
        row.positions.extend(range(IMAGE_TOKENS, IMAGE_TOKENS + added))
        row.segments += [len(row.kinds)] * added


class _Row:
    """One picture's sequence while it grows."""

    def __init__(self, image_id: int) -> None:
        self.tokens = [image_id] * IMAGE_TOKENS
        self.positions = list(range(IMAGE_TOKENS))
        self.segments = [0] * IMAGE_TOKENS
        self.targets = [IGNORE] * IMAGE_TOKENS
        self.places: list[int] = []
        self.references: list[tuple[int, ...]] = []
        self.questions: list[tuple[int, ...]] = []
        self.answers: list[int] = []
        self.kinds: list[str] = []


def _reference_labels(scene: Scene, reference: language.Reference) -> tuple[int, ...]:
    found = find(scene, reference)
    if len(found) != 1:
        return (*[IGNORE] * 5, min(len(found), 7))
    thing = scene.things[found[0]]
    return (*(v.index(thing.value(n)) for n, v in _VALUES.items()), thing.column, thing.row, 1)


def _question_labels(scene: Scene, query: SceneQuestion) -> tuple[int, ...]:
    unknown = (IGNORE,) * (len(REFERENCE_HEADS) - 1)
    labels = [_reference_labels(scene, r)[:-1] for r in query.references]
    first, second = labels[0], labels[1] if len(labels) == 2 else unknown
    if IGNORE in (first[0], second[0]):
        return (*first, *second, *[IGNORE] * 4)
    a, b = (scene.things[find(scene, r)[0]] for r in query.references)
    sides = [(x > y) - (x < y) + 1 for x, y in ((a.column, b.column), (a.row, b.row))]
    return (*first, *second, *sides, int(a.color == b.color), int(a.size == b.size))


def _patch_labels(scenes: list[Scene]) -> dict[str, np.ndarray]:
    side = SIDE // PATCH
    span = side // GRID
    labels = {name: np.zeros((len(scenes), side, side), np.int64) for name in PATCH_HEADS}
    labels["column"][:] = np.arange(side) // span
    labels["row"][:] = (np.arange(side) // span)[:, None]
    for i, scene in enumerate(scenes):
        for t in scene.things:
            for name, values in _VALUES.items():
                cell = labels[name][
                    i, t.row * span : (t.row + 1) * span, t.column * span : (t.column + 1) * span
                ]
                cell[:] = values.index(t.value(name)) + 1
    return {name: v.reshape(len(scenes), -1) for name, v in labels.items()}

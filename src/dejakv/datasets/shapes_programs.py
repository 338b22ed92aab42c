"""Questions as functional programs over a scene graph, in GQA's form, and their interpreter."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dejakv.datasets.shapes_language import Reference
from dejakv.datasets.shapes_scene import COLORS, SHAPES, SIZES, Scene, Thing, relations

KINDS = ("color", "size", "shape", "exist", "count", "same color", "same size", "left", "right", "above", "below")
TYPES = {
    **{k: k for k in ("color", "size", "shape", "exist", "count")},
    **dict.fromkeys(("same color", "same size"), "compare"),
    **dict.fromkeys(("left", "right", "above", "below"), "relation"),
}
"""The question type that each kind belongs to: accuracy is reported by type."""


@dataclass(frozen=True)
class Query:
    """A question, without its wording."""

    kind: str
    references: tuple[Reference, ...]


@dataclass(frozen=True)
class Step:
    """One operation of a program; `dependencies` are the steps whose results it takes."""

    operation: str
    argument: str
    dependencies: tuple[int, ...] = ()


def program(query: Query) -> tuple[Step, ...]:
    """The query's functional program: select and filter each thing, then ask."""
    steps: list[Step] = []
    ends: list[int] = []
    for ref in query.references:
        steps.append(Step("select", ref.shape or "thing"))
        for name in ("color", "size"):
            value = ref.color if name == "color" else ref.size
            if value is not None:
                steps.append(Step(f"filter {name}", value, (len(steps) - 1,)))
        ends.append(len(steps) - 1)
    kind, last = query.kind, tuple(ends)
    if kind in ("color", "size", "shape"):
        steps.append(Step("query", kind, last))
    elif kind in ("exist", "count") or kind.startswith("same"):
        steps.append(Step(kind, "?", last))
    else:
        steps.append(Step("verify rel", kind, last))
    return tuple(steps)


def find(scene: Scene, reference: Reference) -> list[int]:
    """Indices of the things that the reference fits."""
    return [i for i, t in enumerate(scene.things) if _fits(t, reference)]


def execute(steps: Sequence[Step], scene: Scene) -> str:
    """Run a program. Returns the answer: a word or a digit."""
    results: list[list[Thing]] = []
    for step in steps:
        inputs = [results[i] for i in step.dependencies]
        if step.operation == "select":
            results.append([t for t in scene.things if step.argument in ("thing", t.shape)])
        elif step.operation.startswith("filter"):
            name = step.operation.split()[1]
            results.append([t for t in inputs[0] if t.value(name) == step.argument])
        else:
            return _FINAL[step.operation.split()[0]](step, inputs)
    raise ValueError("a program ends with query, exist, count, same or verify")


def answer(query: Query, scene: Scene) -> str:
    """The true answer to the query in the scene."""
    return execute(program(query), scene)


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


_FINAL: dict[str, Callable[[Step, list[list[Thing]]], str]] = {
    "query": lambda step, found: found[0][0].value(step.argument),
    "exist": lambda step, found: _yes(bool(found[0])),
    "count": lambda step, found: str(len(found[0])),
    "same": lambda step, found: _yes(len({f[0].value(step.operation.split()[1]) for f in found}) == 1),
    "verify": lambda step, found: _yes(step.argument in relations(found[0][0], found[1][0])),
}


def sample(scene: Scene, rng: random.Random, kind: str) -> Query | None:
    """A random query of the kind whose answer is well defined in the scene; None if the scene has none (try another kind).

    For yes-or-no questions, each answer is drawn half of the time.
    """
    if kind in ("color", "size", "shape"):
        thing = rng.choice(scene.things)
        ref = refer(scene, thing, rng, avoid=kind)
        return None if ref is None else Query(kind, (ref,))
    if kind == "count":
        return Query(kind, (_count_reference(scene, rng),))
    if kind == "exist":
        return _sample_exist(scene, rng)
    return _sample_pair(scene, rng, kind)


_WAYS = (("shape",), ("shape",), ("color", "shape"), ("color",), ("size", "shape"), ("size", "color"))


def refer(scene: Scene, thing: Thing, rng: random.Random, avoid: str | None = None) -> Reference | None:
    """A way to name this thing and no other, without the attribute `avoid`; None if there is none."""
    ways = [w for w in _WAYS if avoid not in w and not (avoid == "shape" and w == ("shape",))]
    rng.shuffle(ways)
    for way in ways:
        ref = Reference(**{name: thing.value(name) for name in way})
        if len(find(scene, ref)) == 1:
            return ref
    return None


def _fits(thing: Thing, ref: Reference) -> bool:
    return ref.shape in (None, thing.shape) and ref.color in (None, thing.color) and ref.size in (None, thing.size)


def _count_reference(scene: Scene, rng: random.Random) -> Reference:
    thing, draw = rng.choice(scene.things), rng.random()
    if draw < 0.25:
        return Reference()
    if draw < 0.5:
        return Reference(color=thing.color if rng.random() < 0.85 else rng.choice(COLORS))
    if draw < 0.8:
        return Reference(shape=thing.shape if rng.random() < 0.85 else rng.choice(SHAPES))
    return Reference(size=rng.choice(SIZES))


def _sample_exist(scene: Scene, rng: random.Random) -> Query | None:
    wanted = rng.random() < 0.5
    for _ in range(8):
        thing, other = rng.choice(scene.things), rng.choice(scene.things)
        draw = rng.random()
        if draw < 0.7:  # a colour of one thing on the shape of another is the hardest no
            color = other.color if wanted or rng.random() < 0.6 else rng.choice(COLORS)
            shape = thing.shape if wanted or rng.random() < 0.6 else rng.choice(SHAPES)
            ref = Reference(shape, thing.color if wanted else color)
        elif draw < 0.85:
            ref = Reference(shape=thing.shape if wanted else rng.choice(SHAPES))
        else:
            ref = Reference(color=thing.color if wanted else rng.choice(COLORS))
        if bool(find(scene, ref)) == wanted:
            return Query("exist", (ref,))
    return None


def _sample_pair(scene: Scene, rng: random.Random, kind: str) -> Query | None:
    same = kind.split()[1] if kind.startswith("same") else None
    # Few scenes hold two things of one colour, so ask for them more often: yes and no come out even.
    wanted = rng.random() < (0.62 if kind == "same color" else 0.5)
    things = list(scene.things)
    rng.shuffle(things)
    for i, one in enumerate(things):
        for other in things[i + 1 :]:
            if same is not None:
                if (one.value(same) == other.value(same)) != wanted:
                    continue
            elif (one.column == other.column) if kind in ("left", "right") else (one.row == other.row):
                continue  # in one column neither is left of the other: not asked
            first, second = one, other
            if same is None and (kind in relations(one, other)) != wanted:
                first, second = other, one
            a, b = refer(scene, first, rng, same), refer(scene, second, rng, same)
            if a is not None and b is not None:
                return Query(kind, (a, b))
    return None

"""Questions as functional programs over a scene graph in GQA's form, with their interpreter."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dejakv_models import shapes_language as language
from dejakv_models.shapes_language import Reference, Split
from dejakv_models.shapes_scene import COLORS, SHAPES, SIZES, Scene, Thing, relations

KINDS = (
    "color",
    "size",
    "shape",
    "exist",
    "count",
    "same color",
    "same size",
    "left",
    "right",
    "above",
    "below",
)
TYPES = {
    **{k: k for k in ("color", "size", "shape", "exist", "count")},
    **dict.fromkeys(("same color", "same size"), "compare"),
    **dict.fromkeys(("left", "right", "above", "below"), "relation"),
}
"""The question type that each kind belongs to: accuracy is reported by type."""


@dataclass(frozen=True)
class SceneQuestion:
    """Question about a scene, without its wording."""

    kind: str
    references: tuple[Reference, ...]


@dataclass(frozen=True)
class Step:
    """One operation of a program; `dependencies` are the steps whose results it takes."""

    operation: str
    argument: str
    dependencies: tuple[int, ...] = ()


def program(query: SceneQuestion) -> tuple[Step, ...]:
    """Return the query's functional program: select and filter each thing, then ask."""
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
    """Return the indices of the things that the reference fits."""
    return [i for i, t in enumerate(scene.things) if _fits(t, reference)]


def execute(steps: Sequence[Step], scene: Scene) -> str:
    """Run a program, and return the answer: a word or a digit."""
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


def answer(query: SceneQuestion, scene: Scene) -> str:
    """Return the true answer to the query in the scene."""
    return execute(program(query), scene)


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


_FINAL: dict[str, Callable[[Step, list[list[Thing]]], str]] = {
    "query": lambda step, found: found[0][0].value(step.argument),
    "exist": lambda step, found: _yes(bool(found[0])),
    "count": lambda step, found: str(len(found[0])),
    "same": lambda step, found: _yes(
        len({f[0].value(step.operation.split()[1]) for f in found}) == 1
    ),
    "verify": lambda step, found: _yes(step.argument in relations(found[0][0], found[1][0])),
}


def sample(scene: Scene, rng: random.Random, kind: str) -> SceneQuestion | None:
    """Draw a query of the kind whose answer is well defined in the scene.

    It is None if the scene has none: another kind may have one. For yes-or-no questions, each
    answer is drawn half of the time.
    """
    if kind in ("color", "size", "shape"):
        thing = rng.choice(scene.things)
        ref = refer(scene, thing, rng, avoid=kind)
        return None if ref is None else SceneQuestion(kind, (ref,))
    if kind == "count":
        return SceneQuestion(kind, (_count_reference(scene, rng),))
    if kind == "exist":
        return _sample_exist(scene, rng)
    return _sample_pair(scene, rng, kind)


_WAYS = (
    ("shape",),
    ("shape",),
    ("color", "shape"),
    ("color",),
    ("size", "shape"),
    ("size", "color"),
)


def refer(
    scene: Scene, thing: Thing, rng: random.Random, avoid: str | None = None
) -> Reference | None:
    """Name this thing and no other, without the attribute `avoid`; None if there is no way."""
    ways = [w for w in _WAYS if avoid not in w and not (avoid == "shape" and w == ("shape",))]
    rng.shuffle(ways)
    for way in ways:
        ref = Reference(**{name: thing.value(name) for name in way})
        if len(find(scene, ref)) == 1:
            return ref
    return None


def _fits(thing: Thing, ref: Reference) -> bool:
    return (
        ref.shape in (None, thing.shape)
        and ref.color in (None, thing.color)
        and ref.size in (None, thing.size)
    )


def _count_reference(scene: Scene, rng: random.Random) -> Reference:
    thing, draw = rng.choice(scene.things), rng.random()
    if draw < 0.25:
        return Reference()
    if draw < 0.5:
        return Reference(color=thing.color if rng.random() < 0.85 else rng.choice(COLORS))
    if draw < 0.8:
        return Reference(shape=thing.shape if rng.random() < 0.85 else rng.choice(SHAPES))
    return Reference(size=rng.choice(SIZES))


def _sample_exist(scene: Scene, rng: random.Random) -> SceneQuestion | None:
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
            return SceneQuestion("exist", (ref,))
    return None


def _sample_pair(scene: Scene, rng: random.Random, kind: str) -> SceneQuestion | None:
    same = kind.split()[1] if kind.startswith("same") else None
    # Few scenes hold two things of one colour, so ask for them more often: yes and no come out
    # even.
    wanted = rng.random() < (0.62 if kind == "same color" else 0.5)
    things = list(scene.things)
    rng.shuffle(things)
    for i, one in enumerate(things):
        for other in things[i + 1 :]:
            if same is not None:
                if (one.value(same) == other.value(same)) != wanted:
                    continue
            elif (
                (one.column == other.column)
                if kind in ("left", "right")
                else (one.row == other.row)
            ):
                continue  # in one column neither is left of the other: not asked
            first, second = one, other
            if same is None and (kind in relations(one, other)) != wanted:
                first, second = other, one
            a, b = refer(scene, first, rng, same), refer(scene, second, rng, same)
            if a is not None and b is not None:
                return SceneQuestion(kind, (a, b))
    return None


SYNONYM_SETS = (0, language.VARIANTS - 1)
"""The data set uses the first synonym of every noun, or the second of every noun."""


@dataclass(frozen=True)
class Wording:
    """Wording of a query: the number of its kind's template (of both splits), and its synonyms.

    The synonyms are 0 or 1.
    """

    template: int
    synonyms: int = 0

    def text(self, query: SceneQuestion) -> str:
        """Return the question."""
        template = language.templates(query.kind, "all")[self.template]
        return language.wording(query.kind, query.references, template, SYNONYM_SETS[self.synonyms])

    def held_out(self, query: SceneQuestion) -> bool:
        """Tell whether this template was kept out of shapes-vlm's training."""
        return self.template >= len(language.templates(query.kind, "seen"))


def wordings(query: SceneQuestion, split: Split = "all") -> list[Wording]:
    """Return every wording of the query within the split."""
    seen, every = (
        len(language.templates(query.kind, "seen")),
        len(language.templates(query.kind, "all")),
    )
    chosen = {"seen": range(seen), "held-out": range(seen, every), "all": range(every)}[split]
    return [Wording(template, synonyms) for synonyms in (0, 1) for template in chosen]


def question_id(image_id: str, query: SceneQuestion, wording: Wording) -> str:
    """Return the id of a question, the same for the same picture and words in any stream."""
    return f"{image_id}-{_digest(query)}-{wording.template}{'ab'[wording.synonyms]}"


@lru_cache(maxsize=4096)
def _digest(query: SceneQuestion) -> str:
    said = (  # published ids are digests of this text
        f"Query(kind={query.kind!r}, references={query.references!r})"
    )
    return hashlib.blake2b(said.encode(), digest_size=4).hexdigest()


def record(image_id: str, scene: Scene, query: SceneQuestion, wording: Wording) -> dict[str, Any]:
    """Return GQA's fields for the question, and three more.

    These are `kind`, `type` and `heldOut` (its wording is not trained on).
    """
    said = answer(query, scene)
    steps = semantic(query, scene)
    return {
        "id": question_id(image_id, query, wording),
        "imageId": image_id,
        "question": wording.text(query),
        "answer": said,
        "fullAnswer": full_answer(query, said),
        "semantic": steps,
        "semanticStr": semantic_text(steps),
        "groups": _groups(query),
        "types": _types(query.kind),
        "kind": query.kind,
        "type": TYPES[query.kind],
        "heldOut": wording.held_out(query),
    }


def semantic(query: SceneQuestion, scene: Scene) -> list[dict[str, Any]]:
    """Return the program as GQA writes it.

    A selection names the ids of the selected things ("-" for none).
    """
    steps = program(query)
    found = iter([",".join(map(str, find(scene, ref))) or "-" for ref in query.references])
    return [
        {
            "operation": s.operation,
            "dependencies": list(s.dependencies),
            "argument": f"{s.argument} ({next(found)})" if s.operation == "select" else s.argument,
        }
        for s in steps
    ]


def semantic_text(steps: list[dict[str, Any]]) -> str:
    """Return GQA's `semanticStr`: "select: ball (2)->query: color [0]"."""
    parts: list[str] = []
    for step in steps:
        needs = f" [{','.join(map(str, step['dependencies']))}]" if step["dependencies"] else ""
        parts.append(f"{step['operation']}: {step['argument']}{needs}")
    return "->".join(parts)


def full_answer(query: SceneQuestion, said: str) -> str:
    """Return the answer as a sentence."""
    a, *more = [
        language.noun_phrase(r, plural=query.kind == "count" and said != "1")
        for r in query.references
    ]
    b = more[0] if more else ""
    kind = query.kind
    if kind in ("color", "size"):
        return f"The {a} is {said}."
    if kind == "shape":
        return f"The {a} is a {said}."
    if kind == "count":
        return f"There {'is' if said == '1' else 'are'} {said} {a}."
    if kind == "exist":
        return (
            f"Yes, there is {language.article(a)} {a}."
            if said == "yes"
            else f"No, there is no {a}."
        )
    if kind.startswith("same"):
        verb = "have" if said == "yes" else "do not have"
        return f"{said.capitalize()}, the {a} and the {b} {verb} the {kind}."
    link = f"{kind} of" if kind in ("left", "right") else kind
    return f"{said.capitalize()}, the {a} is {'' if said == 'yes' else 'not '}{link} the {b}."


def _types(kind: str) -> dict[str, str]:
    detail = kind.replace(" ", "_")
    if kind in ("color", "size", "shape"):
        return {
            "structural": "query",
            "semantic": "cat" if kind == "shape" else "attr",
            "detailed": detail,
        }
    if kind in ("exist", "count"):
        return {
            "structural": "verify" if kind == "exist" else "query",
            "semantic": "obj",
            "detailed": detail,
        }
    if kind.startswith("same"):
        return {"structural": "compare", "semantic": "attr", "detailed": detail}
    return {"structural": "verify", "semantic": "rel", "detailed": f"{detail}_rel"}


def _groups(query: SceneQuestion) -> dict[str, str | None]:
    shapes = "-".join(r.shape or "thing" for r in query.references)
    return {"global": TYPES[query.kind], "local": f"{shapes}_{query.kind.replace(' ', '_')}"}

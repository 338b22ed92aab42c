"""The record of one question about one scene, with the fields that GQA's questions have."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dejakv.datasets import shapes_language as language
from dejakv.datasets.shapes_language import Reference, Split
from dejakv.datasets.shapes_programs import TYPES, Query, answer, find, program
from dejakv.datasets.shapes_scene import Scene

SYNONYM_SETS = (0, language.VARIANTS - 1)
"""The data set uses the first synonym of every noun, or the second of every noun."""


@dataclass(frozen=True)
class Wording:
    """The wording of a query: the number of its kind's template (of both splits), and its synonyms (0 or 1)."""

    template: int
    synonyms: int = 0

    def text(self, query: Query) -> str:
        """The question."""
        template = language.templates(query.kind, "all")[self.template]
        return language.wording(query.kind, query.references, template, SYNONYM_SETS[self.synonyms])

    def held_out(self, query: Query) -> bool:
        """Whether this template was kept out of shapes-vlm's training."""
        return self.template >= len(language.templates(query.kind, "seen"))


def wordings(query: Query, split: Split = "all") -> list[Wording]:
    """Every wording of the query within the split."""
    seen, every = len(language.templates(query.kind, "seen")), len(language.templates(query.kind, "all"))
    chosen = {"seen": range(seen), "held-out": range(seen, every), "all": range(every)}[split]
    return [Wording(template, synonyms) for synonyms in (0, 1) for template in chosen]


def question_id(image_id: str, query: Query, wording: Wording) -> str:
    """The same for the same question about the same picture, in any stream."""
    return f"{image_id}-{_digest(query)}-{wording.template}{'ab'[wording.synonyms]}"


@lru_cache(maxsize=4096)
def _digest(query: Query) -> str:
    return hashlib.blake2b(repr(query).encode(), digest_size=4).hexdigest()


def record(image_id: str, scene: Scene, query: Query, wording: Wording, split: Split = "all") -> dict[str, Any]:
    """GQA's fields for the question, and three more: `kind`, `type` and `heldOut` (its wording is not trained on).

    `equivalent` lists the ids of the query's other wordings about this picture. `entailed` lists those and the ids
    of questions whose answers follow from this one's.
    """
    said = answer(query, scene)
    equivalent = [question_id(image_id, query, w) for w in wordings(query, split) if w != wording]
    follows = [question_id(image_id, q, w) for q in entailed(query, said) for w in wordings(q, split)]
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
        "entailed": equivalent + follows,
        "equivalent": equivalent,
        "kind": query.kind,
        "type": TYPES[query.kind],
        "heldOut": wording.held_out(query),
    }


def semantic(query: Query, scene: Scene) -> list[dict[str, Any]]:
    """The program as GQA writes it; a selection names the ids of the selected things ("-" for none)."""
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
    """GQA's `semanticStr`: "select: ball (2)->query: color [0]"."""
    parts: list[str] = []
    for step in steps:
        needs = f" [{','.join(map(str, step['dependencies']))}]" if step["dependencies"] else ""
        parts.append(f"{step['operation']}: {step['argument']}{needs}")
    return "->".join(parts)


def full_answer(query: Query, said: str) -> str:
    """The answer as a sentence."""
    a, *more = [language.noun_phrase(r, plural=query.kind == "count" and said != "1") for r in query.references]
    b = more[0] if more else ""
    kind = query.kind
    if kind in ("color", "size"):
        return f"The {a} is {said}."
    if kind == "shape":
        return f"The {a} is a {said}."
    if kind == "count":
        return f"There {'is' if said == '1' else 'are'} {said} {a}."
    if kind == "exist":
        return f"Yes, there is {language.article(a)} {a}." if said == "yes" else f"No, there is no {a}."
    if kind.startswith("same"):
        verb = "have" if said == "yes" else "do not have"
        return f"{said.capitalize()}, the {a} and the {b} {verb} the {kind}."
    link = f"{kind} of" if kind in ("left", "right") else kind
    return f"{said.capitalize()}, the {a} is {'' if said == 'yes' else 'not '}{link} the {b}."


def entailed(query: Query, said: str) -> list[Query]:
    """Other queries whose answers follow from this query and its answer."""
    first = query.references[0]
    if query.kind in ("color", "size", "shape"):
        values = {"shape": first.shape, "color": first.color, "size": first.size, query.kind: said}
        return [Query("exist", (Reference(**values),)), Query("exist", (first,))]
    if query.kind == "exist" and said == "yes":
        parts = [Reference(shape=first.shape), Reference(color=first.color)]
        return [Query("exist", (p,)) for p in parts if p not in (first, Reference())]
    if query.kind == "count" and said != "0" and first != Reference():
        return [Query("exist", (first,))]
    if len(query.references) == 2:
        swapped = query.references[::-1]
        opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}.get(query.kind, query.kind)
        return [Query(opposite, swapped)]
    return []


def _types(kind: str) -> dict[str, str]:
    detail = kind.replace(" ", "_")
    if kind in ("color", "size", "shape"):
        return {"structural": "query", "semantic": "cat" if kind == "shape" else "attr", "detailed": detail}
    if kind in ("exist", "count"):
        return {"structural": "verify" if kind == "exist" else "query", "semantic": "obj", "detailed": detail}
    if kind.startswith("same"):
        return {"structural": "compare", "semantic": "attr", "detailed": detail}
    return {"structural": "verify", "semantic": "rel", "detailed": f"{detail}_rel"}


def _groups(query: Query) -> dict[str, str | None]:
    shapes = "-".join(r.shape or "thing" for r in query.references)
    return {"global": TYPES[query.kind], "local": f"{shapes}_{query.kind.replace(' ', '_')}"}

"""How often equal text and the lexical guard take one question for another, by kind.

The table also tells how many paraphrases they serve.
"""

import json
import random
import time
from pathlib import Path
from typing import Annotated

import typer

from dejakv.decide.guards.lexical import LexicalGuard
from dejakv.decide.literals import normalize
from dejakv_models.docs_facts import ATTRIBUTES, NAMES
from dejakv_models.shapes_language import NOUNS, SEEN, VARIANTS, Reference, templates, wording
from research.command import run
from research.machine import machine

Pair = tuple[str, str]

PAIRS = Path(__file__).with_name("guard_pairs.json")


def pairs_of_kinds() -> dict[str, list[Pair]]:
    """Read the pairs that must not be served as one another, by kind."""
    read = json.loads(PAIRS.read_text("utf-8"))
    return {kind: [(one, other) for one, other in pairs] for kind, pairs in read.items()}


def shapes_paraphrase(rng: random.Random) -> Pair:
    kind = rng.choice(list(SEEN))
    shapes = rng.sample(list(NOUNS), 2 if "{b}" in SEEN[kind][0] else 1)
    things = tuple(Reference(shape, rng.choice(("red", "gray", None))) for shape in shapes)
    variants = [
        (template, number) for template in templates(kind, "all") for number in range(VARIANTS)
    ]
    wordings = sorted({wording(kind, things, template, number) for template, number in variants})
    one, other = rng.sample(wordings, 2)
    return one, other


def docs_paraphrase(rng: random.Random) -> Pair:
    attribute, person = ATTRIBUTES[rng.choice(list(ATTRIBUTES))], rng.choice(NAMES)
    one, other = rng.sample((*attribute.questions, *attribute.held_out_questions), 2)
    return one.format(n=person), other.format(n=person)


def main(
    paraphrases: Annotated[int, typer.Option(min=1, help="Paraphrases of each data set.")] = 10_000,
    seed: int = 0,
    show: Annotated[bool, typer.Option("--show", help="Print the pairs taken for one.")] = False,
) -> None:
    """Print the table."""
    guard = LexicalGuard()
    print(machine())
    print("| kind | pairs | equal text | guard |\n|---|---:|---:|---:|")
    total, equal, passed = 0, 0, 0
    for kind, pairs in pairs_of_kinds().items():
        same = [pair for pair in pairs if normalize(pair[0]) == normalize(pair[1])]
        served = [pair for pair in pairs if not guard.difference(*pair)]
        print(f"| {kind} | {len(pairs)} | {len(same)} | {len(served)} |")
        total, equal, passed = total + len(pairs), equal + len(same), passed + len(served)
        if show and served:
            print(*(f"    {one!r} / {other!r}" for one, other in served), sep="\n")
    print(f"| all | {total} | {equal} | {passed} |")
    for name, paraphrase in (("shapes", shapes_paraphrase), ("documents", docs_paraphrase)):
        rng = random.Random(seed)
        drawn = [paraphrase(rng) for _ in range(paraphrases)]
        began = time.perf_counter()
        served = sum(not guard.difference(*pair) for pair in drawn)
        each = (time.perf_counter() - began) / paraphrases
        print(
            f"{name}: {served} of {paraphrases} paraphrases served, {each * 1e6:.0f} microseconds a"
            " pair"
        )


if __name__ == "__main__":
    run(main)

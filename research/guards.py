"""How often the lexical guard is wrong: on the wordings of the shapes and docs questions, every pair of meanings known.

    python -m research.guards [--pairs 20000] [--seed 0] [--json FILE]

False accept: two questions of different meaning pass. False reject: two wordings of one meaning do not. Hard negatives
differ in one word's worth: another thing, colour or size, another kind about the same things, the two things swapped.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dejakv.decide.guards.lexical import LexicalGuard
from dejakv.experiments.summary import wilson
from dejakv_models.docs_facts import ATTRIBUTES, NAMES
from dejakv_models.shapes_language import NOUNS, SEEN, VARIANTS, Reference, templates, wording
from dejakv_models.shapes_scene import COLORS, SIZES
from research.machine import machine

Pair = tuple[str, str]
Meaning = tuple[str, tuple[Reference, ...]]


def shapes_question(meaning: Meaning, rng: random.Random) -> str:
    kind, references = meaning
    return wording(kind, references, rng.choice(templates(kind, "all")), rng.randrange(VARIANTS))


def shapes_meaning(rng: random.Random, kind: str | None = None) -> Meaning:
    kind = kind or rng.choice(list(SEEN))
    count = 2 if "{b}" in SEEN[kind][0] else 1
    return kind, tuple(reference(rng) for _ in range(count))


def reference(rng: random.Random) -> Reference:
    while True:
        ref = Reference(
            rng.choice([*NOUNS]), rng.choice([None, None, *COLORS[:4]]), rng.choice([None, None, None, *SIZES])
        )
        if any((ref.shape, ref.color, ref.size)):
            return ref


def shapes_near(meaning: Meaning, rng: random.Random) -> Meaning:
    """A meaning that differs in as little as possible."""
    kind, refs = meaning
    while True:
        draw = rng.random()
        if draw < 0.3:
            mates = [k for k in SEEN if k != kind and ("{b}" in SEEN[k][0]) == (len(refs) == 2)]
            other = rng.choice(mates), refs
        elif draw < 0.5 and len(refs) == 2 and not kind.startswith("same"):
            other = kind, (refs[1], refs[0])
        else:
            place = rng.randrange(len(refs))
            field = rng.choice(["shape", "color", "size"])
            values = {"shape": [*NOUNS], "color": [None, *COLORS], "size": [None, *SIZES]}[field]
            changed = Reference(**{**vars(refs[place]), field: rng.choice(values)})
            other = kind, (*refs[:place], changed, *refs[place + 1 :])
        if other != meaning:
            return other


def shapes_pairs(rng: random.Random, count: int) -> dict[str, list[Pair]]:
    same, near, far = [], [], []
    while len(same) < count:
        meaning = shapes_meaning(rng)
        one, other = shapes_question(meaning, rng), shapes_question(meaning, rng)
        if one != other:
            same.append((one, other))
        near.append((one, shapes_question(shapes_near(meaning, rng), rng)))
        stranger = shapes_meaning(rng)
        if stranger != meaning:
            far.append((one, shapes_question(stranger, rng)))
    return {"same": same, "near": near, "far": far}


def docs_pairs(rng: random.Random, count: int) -> dict[str, list[Pair]]:
    same, near, far = [], [], []
    questions = {name: (*a.questions, *a.held_out_questions) for name, a in ATTRIBUTES.items()}
    while len(same) < count:
        attribute, person = rng.choice(list(questions)), rng.choice(NAMES)
        one, other = rng.sample(questions[attribute], 2)
        same.append((one.format(n=person), other.format(n=person)))
        if rng.random() < 0.5:  # another person, the same wording
            near.append((one.format(n=person), one.format(n=rng.choice([n for n in NAMES if n != person]))))
        else:
            stranger = rng.choice([a for a in questions if a != attribute])
            near.append((one.format(n=person), rng.choice(questions[stranger]).format(n=person)))
        strangers = rng.choice([n for n in NAMES if n != person]), rng.choice([a for a in questions if a != attribute])
        far.append((one.format(n=person), rng.choice(questions[strangers[1]]).format(n=strangers[0])))
    return {"same": same, "near": near, "far": far}


def rates(guard: LexicalGuard, pairs: dict[str, list[Pair]], show: int) -> Iterator[tuple[str, int, int, list[Pair]]]:
    for group, label, wrong_if in (
        ("same", "false reject", lambda difference: bool(difference)),
        ("near", "false accept, one thing changed", lambda difference: not difference),
        ("far", "false accept, any two questions", lambda difference: not difference),
    ):
        check: Callable[[str], bool] = wrong_if
        wrong = [pair for pair in pairs[group] if check(guard.difference(*pair))]
        yield label, len(wrong), len(pairs[group]), list(itertools.islice(wrong, show))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong pairs of each kind")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    guard, rows = LexicalGuard(), []
    print(f"lexical guard, seed {args.seed}, {machine()}")
    for name, make in (("shapes", shapes_pairs), ("docs", docs_pairs)):
        pairs = make(random.Random(args.seed), args.pairs)
        began = time.perf_counter()
        for label, wrong, total, examples in rates(guard, pairs, args.show):
            low, high = wilson(wrong, total)
            print(f"{name:7} {label:32} {wrong:6}/{total:<6} {wrong / total:8.4%}  95% [{low:.4%}, {high:.4%}]")
            for pair in examples:
                print(f"        {pair[0]!r} / {pair[1]!r}: {guard.difference(*pair) or 'accepted'}")
            rows.append({"data": name, "what": label, "wrong": wrong, "pairs": total, "low": low, "high": high})
        spent = (time.perf_counter() - began) / sum(map(len, pairs.values()))
        print(f"{name:7} {spent * 1e6:.0f} microseconds a pair")
        rows.append({"data": name, "what": "microseconds a pair", "value": spent * 1e6})
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

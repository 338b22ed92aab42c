"""Which donors a blend takes where the same passage stands in several: ways beside all of a case's donors, as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dejakv.decide.copied.fingerprints import GUARANTEED, fingerprints
from dejakv.decide.copied.index import CopiedIndex
from dejakv.decide.copied.search import cover
from dejakv.identity import common_prefix
from research.frontier.cases import Case

Way = Literal["", "latest", "alone", "alone-equal-cost"]
"""Of each passage: any donor; the one in which it stood furthest from the beginning; it, computed behind the instruction alone, which makes
the first passage an exact prefix; the same, with as many recomputed tokens as without."""
WAYS: tuple[Way, ...] = ("latest", "alone", "alone-equal-cost")

NOWHERE = -2
"""Stands for a donor's token that is not to be taken: equal to none."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Chosen:
    """Token ids of each donor's prompt; `visible`: the same as the token map sees them."""

    prompts: tuple[Tokens, ...]
    visible: tuple[Tokens, ...]


def chosen(case: Case, way: Way) -> Chosen:
    """A passage is taken from one donor alone, all else (the question) from any donor that has it."""
    if not way or len(case.alone) < 2:
        return Chosen(case.donors, case.donors)
    held = [_places(donor, case.alone) for donor in case.donors]
    latest: dict[int, tuple[int, int]] = {}
    for number, passages in enumerate(held):
        for passage, (start, _) in passages.items():
            latest[passage] = max(latest.get(passage, (-1, -1)), (start, number))
    visible: list[Tokens] = []
    for number, (donor, passages) in enumerate(zip(case.donors, held, strict=True)):
        ids, exact = list(donor), common_prefix(donor, case.target)
        for passage, (start, stop) in passages.items():
            if way != "latest" or (latest[passage] != (start, number) and exact - start < GUARANTEED):
                ids[start:stop] = [NOWHERE] * (stop - start)
        visible.append(tuple(ids))
    if way == "latest":
        return Chosen(case.donors, tuple(visible))
    own = tuple(case.alone[passage] for passage in sorted(latest))
    return Chosen((*own, *case.donors), (*own, *visible))


def _places(donor: Tokens, alone: Sequence[Tokens]) -> dict[int, tuple[int, int]]:
    """First token and stop of each passage in a donor's prompt, by the passage's number."""
    begins = common_prefix(alone[0], alone[1])
    target, found = np.asarray(donor, dtype=np.int64), dict[int, tuple[int, int]]()
    for number, ids in enumerate(alone):
        prompt, index = np.asarray(ids, dtype=np.int64), CopiedIndex()
        index.add({"": fingerprints(prompt)})
        for run in cover(target, index, {"": prompt}.get).runs:
            start = run.start + max(0, begins - run.source)
            if run.start + run.length - start >= GUARANTEED:
                found[number] = (start, run.start + run.length)
    return found

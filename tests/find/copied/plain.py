"""Finding copied text spelled out: the definition that tests and the benchmark hold against."""

from collections.abc import Mapping, Sequence

import numpy as np

from dejakv.decide.copied.fingerprints import GUARANTEED, Ids, fingerprints
from dejakv.decide.copied.index import CopiedIndex
from dejakv.decide.copied.search import DonorCover, cover

Texts = Mapping[str, Ids]


def indexed(texts: Texts) -> CopiedIndex:
    index = CopiedIndex()
    for name, tokens in texts.items():
        index.add({name: fingerprints(tokens)})
    return index


def covered_by(target: Ids, texts: Texts) -> set[int]:
    """Places of the prompt in runs of at least `GUARANTEED` tokens that stand in a text: every window compared with every other."""
    least = GUARANTEED
    windows = {tuple(text[i : i + least].tolist()) for text in texts.values() for i in range(len(text) - least + 1)}
    return {
        place
        for start in range(len(target) - least + 1)
        if tuple(target[start : start + least].tolist()) in windows
        for place in range(start, start + least)
    }


def places(found: DonorCover) -> set[int]:
    return {place for run in found.runs for place in range(run.start, run.start + run.length)}


def checked(target: Ids, texts: Texts) -> DonorCover:
    """The cover by an index of these texts: its runs are equal text, none overlaps another."""
    found = cover(target, indexed(texts), texts.get)
    check_runs(target, texts, found)
    return found


def check_runs(target: Ids, texts: Texts, found: DonorCover) -> None:
    for run in found.runs:
        there = texts[run.donor][run.source : run.source + run.length]
        assert np.array_equal(target[run.start : run.start + run.length], there)
    ends: Sequence[int] = [0, *(run.start + run.length for run in found.runs)]
    assert all(run.start >= end for run, end in zip(found.runs, ends, strict=False))
    assert found.covered == len(places(found))

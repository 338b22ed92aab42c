"""What `copied.py` stores and looks up, and the truth that it holds against: every run of 32 tokens, by its hash."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dejakv.decide.copied.fingerprints import GUARANTEED, K, fingerprints
from dejakv.decide.copied.index import MAX_HOLDERS
from dejakv.models import tokenizer_folder
from dejakv.tokens import Ids, run_hashes

PROMPT, PIECE = 4_000, 250


def text_tokens() -> Ids:
    """The standard library without its tests, and the pages of this repository, one after the other."""
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_folder("smollm2-135m")) / "tokenizer.json"))
    library = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(library.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idle_test"} & set(path.relative_to(library).parts)
    ]
    files += sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    texts = [path.read_text(errors="replace") for path in files]
    return np.concatenate([np.array(tokenizer.encode(text).ids, np.int64) for text in texts])


@dataclass
class Source:
    """Where prompts come from."""

    text: Ids
    rng: np.random.Generator

    def __post_init__(self) -> None:
        cuts = np.cumsum(self.rng.integers(100, 800, len(self.text) // 450))
        self.passages = np.split(self.text, cuts[cuts < len(self.text) - 100])
        self.rng.shuffle(self.passages)

    def fresh(self, tokens: int) -> Ids:
        """Tokens drawn from the text, in no order."""
        return self.text[self.rng.integers(0, len(self.text), tokens)]

    def distinct(self, tokens: int) -> Ids:
        text = self.text[:tokens]
        return np.concatenate([text, self.fresh(tokens - len(text))])

    def of_passages(self, tokens: int) -> Ids:
        """Passages in a row; the one of rank r is drawn as often as 1 / r says."""
        ranks = np.exp(self.rng.random(tokens // 200) * np.log(len(self.passages))).astype(np.int64) - 1
        parts = [self.passages[rank] for rank in ranks.tolist()]
        return np.concatenate(parts)[:tokens]

    def query(self, workload: str, kind: str, stored: Ids) -> Ids:
        if kind == "none":
            return self.fresh(PROMPT)
        pieces = [self.of_passages(PROMPT)] if workload == "passages" else []
        while sum(map(len, pieces)) < PROMPT:
            start = int(self.rng.integers(0, len(stored) - PIECE))
            pieces.append(stored[start : start + PIECE])
        whole = np.concatenate(pieces)[:PROMPT]
        if kind == "half":
            fresh = np.arange(PROMPT) // PIECE % 2 == 1
            whole[fresh] = self.fresh(int(fresh.sum()))
        return whole


class Truth:
    """Every run of 32 tokens of every stored prompt, by its hash."""

    def __init__(self, segments: NDArray[np.int64]) -> None:
        self.runs = np.unique(np.concatenate([run_hashes(segment, GUARANTEED) for segment in segments]))
        keys = np.concatenate([fingerprints(segment).keys for segment in segments])
        self.keys, self.holders = np.unique(keys, return_counts=True)

    def known(self, target: Ids) -> NDArray[np.bool_]:
        """Which runs of the prompt are stored."""
        hashes = run_hashes(target, GUARANTEED)
        place = np.minimum(np.searchsorted(self.runs, hashes), len(self.runs) - 1)
        return self.runs[place] == hashes

    def crowded(self, target: Ids) -> NDArray[np.bool_]:
        """Which runs of the prompt contain a fingerprint with more holders than are kept."""
        found = fingerprints(target)
        place = np.minimum(np.searchsorted(self.keys, found.keys), len(self.keys) - 1)
        many = (self.keys[place] == found.keys) & (self.holders[place] > MAX_HOLDERS)
        marks = np.zeros(len(target) + 1, np.int64)
        marks[1 + found.positions[many]] = 1
        counted = np.cumsum(marks)
        starts = np.arange(len(target) - GUARANTEED + 1)
        return counted[starts + GUARANTEED - K + 1] > counted[starts]


def spread_over(runs: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tokens that stand in marked runs."""
    edges = np.zeros(len(runs) + GUARANTEED, np.int64)
    edges[: len(runs)] += runs
    edges[GUARANTEED:] -= runs
    return np.cumsum(edges)[: len(runs) + GUARANTEED - 1] > 0

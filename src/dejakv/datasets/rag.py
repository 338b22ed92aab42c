"""Questions with their retrieved passages, in the order of their scores, as a RAG service sends them.

A passage that is retrieved again has another rank and follows other passages, so prefix caching finds little of it.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from dejakv.datasets.base import Sample
from dejakv.datasets.rag_corpus import Corpus, Passage, Question, read_corpus
from dejakv.errors import ConfigError, MissingExtraError

Order = Literal["score", "document", "shuffled", "free"]
PASSAGES = 8
HEAD = "Answer the question from these passages of the documentation. Say so if they do not hold the answer."


class RagDataset:
    """One sample a question, whose answer is a passage's words and not scored, with `passages` passages by BM25 (Robertson and Zaragoza, 2009) unless the question has its own.

    path   SQuAD's JSON, JSON lines, or a folder of texts; None: documentation of Python's standard library
    order  `score`: best first; `document`: in the order of the corpus; `shuffled`: random, from the seed;
           `free`: as `score`, and a cache may arrange them (`Request.order`)
    seed   which topics are popular (the n-th has weight 1/n), and which question comes next; a recorded log keeps its order

    Raises: DatasetError for a corpus that cannot be read; ConfigError for an unknown order; MissingExtraError.
    """

    name = "rag"

    def __init__(
        self, path: str | None = None, seed: int = 0, passages: int = PASSAGES, order: Order = "score"
    ) -> None:
        if order not in get_args(Order):
            raise ConfigError(f"--order {order!r} is unknown: choose one of {', '.join(get_args(Order))}")
        if passages < 1:
            raise ConfigError(f"--passages {passages}: give 1 or more")
        if path is None:
            from dejakv.datasets.rag_docs import docs_corpus

            self.corpus: Corpus = docs_corpus()
        else:
            self.corpus = read_corpus(path)
        self.seed, self.passages, self.order = seed, passages, order
        self._retriever: Any = _index(self.corpus.passages) if self.corpus.passages else None

    def __iter__(self) -> Iterator[Sample]:
        asked = self.corpus.questions if self.corpus.recorded else tuple(traffic(self.corpus.questions, self.seed))
        for number, question in enumerate(asked):
            found = self._arranged(number, question)
            shown = [_shown(passage) for passage in found]
            context = "\n\n".join([HEAD, *shown])
            fields = {"topic": question.topic, "titles": [passage.title for passage in found]}
            yield Sample(
                f"rag-{number}", question.text, question.answer, context=context, fields=fields,
                parts=self._free(shown), scored=False,
            )  # fmt: skip

    def _arranged(self, number: int, question: Question) -> Sequence[Passage]:
        if question.retrieved:
            places, held = list(range(len(question.retrieved)))[: self.passages], question.retrieved
        else:
            places, held = self._best(question.text), self.corpus.passages
        if self.order == "document":
            places.sort()
        if self.order == "shuffled":
            random.Random(f"rag/{self.seed}/{number}").shuffle(places)
        return [held[place] for place in places]

    def _free(self, shown: Sequence[str]) -> tuple[str, ...]:
        """The passages, if a cache may arrange them: a passage that stands twice in a corpus has no place of its own."""
        return tuple(shown) if self.order == "free" and len(set(shown)) == len(shown) else ()

    def _best(self, question: str) -> list[int]:
        """Indices of the best passages, best first; ties in the order of the corpus."""
        scores = self._retriever.get_scores(words(question))
        return [int(place) for place in (-scores).argsort(kind="stable")[: self.passages]]


def traffic(questions: Sequence[Question], seed: int) -> Iterator[Question]:
    """Every question once, popular topics first and more often: topics are drawn with weight 1/n, in an order given by the seed."""
    rng = random.Random(f"rag/{seed}")
    topics: dict[str, list[Question]] = {}
    for question in questions:
        topics.setdefault(question.topic, []).append(question)
    left = list(topics.values())
    rng.shuffle(left)
    weights = [1 / (rank + 1) for rank in range(len(left))]
    for waiting in left:
        rng.shuffle(waiting)
    while left:
        (chosen,) = rng.choices(range(len(left)), weights)
        yield left[chosen].pop()
        if not left[chosen]:
            del left[chosen], weights[chosen]


def words(text: str) -> list[str]:
    """The terms of BM25: words in lower case."""
    return re.findall(r"\w+", text.lower())


def _index(passages: Sequence[Passage]) -> Any:
    try:
        import bm25s
    except ImportError:
        raise MissingExtraError("bm25s", "rag", "retrieving passages") from None
    retriever = bm25s.BM25()
    retriever.index([words(f"{passage.title} {passage.text}") for passage in passages], show_progress=False)
    return retriever


def _shown(passage: Passage) -> str:
    return (f"[{passage.title}]\n{passage.text}" if passage.title else passage.text).strip()

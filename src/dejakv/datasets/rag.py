"""Questions with their retrieved passages, in the order of their scores, as from a RAG service.

A passage that is retrieved again has another rank and follows other passages, so prefix caching
serves little of it. Corpora are SQuAD's JSON, JSON lines, a folder of texts, or the documentation
of Python's standard library.
"""

import ast
import json
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dejakv.datasets.base import Sample
from dejakv.datasets.files import json_lines
from dejakv.datasets.repo import CodeObject, cut, read_package
from dejakv.errors import ConfigError, DatasetError, MissingExtraError

TEXTS = (".txt", ".md", ".rst")
WORDS = 120
"""Words in a passage cut from a text: paragraphs are joined up to this many."""

FORMS = (
    "SQuAD's JSON (data, paragraphs, context, qas), JSON lines with 'passage' or 'question', or a"
    f" folder of {', '.join(TEXTS)} files"
)


@dataclass(frozen=True)
class Passage:
    """Text that may be retrieved; `title` is its source."""

    title: str
    text: str


@dataclass(frozen=True)
class RagQuestion:
    """Question of a user.

    Attributes
    ----------
    text : str
        The question.
    answer : str or None
        Its answer, if known.
    topic : str
        Its source (article, file or module), by which `traffic` makes questions popular; empty if
        unknown.
    retrieved : tuple[Passage, ...]
        Passages given with the question, best first. If empty, the corpus is searched.
    """

    text: str
    answer: str | None = None
    topic: str = ""
    retrieved: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class PassageCorpus:
    """Passages to search and questions to ask.

    With `recorded`, the questions are a log, and their order is kept.
    """

    passages: tuple[Passage, ...]
    questions: tuple[RagQuestion, ...]
    recorded: bool = False


def read_corpus(path: str | Path) -> PassageCorpus:
    """Read the corpus at a path, in any of the formats.

    Raises
    ------
    DatasetError
        For what is none of them; it names the line or key that does not fit.
    """
    source = Path(path).expanduser()
    if source.is_dir():
        return _folder(source)
    if not source.is_file():
        raise DatasetError(f"no file or folder {str(path)!r}: give {FORMS} with --dataset-path")
    if source.suffix == ".json":
        return _squad(source)

    return _checked(source, *_lines(source), recorded=True)


def _squad(file: Path) -> PassageCorpus:
    passages: list[Passage] = []
    questions: list[RagQuestion] = []
    try:
        for article in json.loads(file.read_text(encoding="utf-8-sig"))["data"]:
            title = str(article.get("title", ""))
            for paragraph in article["paragraphs"]:
                passages.append(Passage(title, paragraph["context"]))
                for qa_item in paragraph["qas"]:
                    answers = qa_item.get("answers") or [{"text": None}]
                    questions.append(RagQuestion(qa_item["question"], answers[0]["text"], title))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DatasetError(
            f"{file.name} is not in SQuAD's format ({error!r}): give {FORMS}"
        ) from error

    return _checked(file, passages, questions)


def _lines(file: Path) -> tuple[list[Passage], list[RagQuestion]]:
    passages: list[Passage] = []
    questions: list[RagQuestion] = []
    for where, record in json_lines(file):
        text = record.get("passage", record.get("text"))
        if isinstance(record.get("question"), str):
            answer = record.get("answer")
            retrieved = tuple(_passage(item, where) for item in record.get("passages") or ())
            questions.append(
                RagQuestion(
                    record["question"], None if answer is None else str(answer), retrieved=retrieved
                )
            )
        elif isinstance(text, str):
            passages.append(Passage(str(record.get("title", "")), text))
        else:
            raise DatasetError(
                f"{where} has neither a text 'passage' nor a text 'question': give {FORMS}"
            )

    return passages, questions


def _passage(item: Any, where: str) -> Passage:
    text = item.get("text", item.get("passage")) if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise DatasetError(
            f"{where}: an item of 'passages' is neither a text nor an object with 'text': give one"
            " of them"
        )
    return Passage(str(item.get("title", "")) if isinstance(item, dict) else "", text)


def _folder(folder: Path) -> PassageCorpus:
    passages: list[Passage] = []
    for file in sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in TEXTS and path.is_file()
    ):
        title = file.relative_to(folder).as_posix()
        passages += [
            Passage(title, text)
            for text in _pieces(file.read_text(encoding="utf-8-sig", errors="replace"))
        ]

    # Without recorded questions each passage asks for its own sentences.
    questions_file = folder / "questions.jsonl"
    if questions_file.is_file():
        more, questions = _lines(questions_file)
        return _checked(folder, passages + more, questions, recorded=True)
    return _checked(
        folder,
        passages,
        [question for passage in passages for question in continuation_questions(passage)],
    )


def _pieces(text: str) -> Iterator[str]:
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text):
        if piece and len(piece.split()) + len(paragraph.split()) > WORDS:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph.strip()}".strip()

    if piece:
        yield piece


def continuation_questions(passage: Passage) -> Iterator[RagQuestion]:
    """Yield a question for each sentence of 10 to 40 words of a passage: how it continues."""
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(passage.text.split())):
        words = sentence.split()
        if 10 <= len(words) <= 40:
            half = len(words) // 2
            question_text = (
                f'How does this sentence go on in the texts: "{" ".join(words[:half])}"?'
            )
            yield RagQuestion(question_text, " ".join(words[half:]), passage.title)


def _checked(
    source: Path, passages: list[Passage], questions: list[RagQuestion], recorded: bool = False
) -> PassageCorpus:
    if not questions:
        raise DatasetError(f"{source.name} has no question: give {FORMS}")
    if not passages and not all(question.retrieved for question in questions):
        raise DatasetError(f"{source.name} has no passage: give {FORMS}")
    return PassageCorpus(tuple(passages), tuple(questions), recorded)


MODULES = (
    "argparse", "asyncio", "calendar", "collections", "csv", "datetime", "difflib", "email",
    "fractions", "functools", "heapq", "http", "inspect", "json", "logging", "pathlib", "random",
    "shutil", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "typing", "unittest", "urllib", "xml", "zipfile",
)  # fmt: skip
MIN_DOC_CHARACTERS, MAX_DOC_CHARACTERS = 150, 1_100
"""Characters of a documentation string: shorter ones say little, longer ones are cut."""


def docs_corpus() -> PassageCorpus:
    """Return passages and questions from the documentation of some of Python's standard modules.

    There is one passage for each public class and function of `MODULES` whose docstring has
    `MIN_DOC_CHARACTERS` or more. The questions ask for its name and for defaults of its parameters;
    every answer is in the passage that its question is about.

    Raises
    ------
    DatasetError
        If the source of a module is not installed.
    """
    passages: list[Passage] = []
    questions: list[RagQuestion] = []
    for module in MODULES:
        for item in read_package(module).objects:
            if len(item.doc) < MIN_DOC_CHARACTERS or item.short.startswith("_"):
                continue
            # `textwrap.wrap` of a module's own file, `asyncio.tasks.gather` of a package's.
            name = item.name if item.name.startswith(f"{module}.") else f"{module}.{item.name}"

            defaults = dict(_defaults(item))
            signature = ", ".join(f"{p}={v}" if v else p for p, v in defaults.items())
            head = f"{name}({signature})" if item.kind == "function" else f"class {name}"
            passages.append(
                Passage(
                    name,
                    f"{head}, {item.kind} of the module"
                    f" {module}\n{cut(item.doc, MAX_DOC_CHARACTERS)}",
                )
            )
            questions += _questions(module, name, item, defaults)

    return PassageCorpus(tuple(passages), tuple(questions))


def _questions(
    module: str, name: str, item: CodeObject, defaults: dict[str, str]
) -> Iterator[RagQuestion]:
    first = " ".join(item.doc.split()).partition(". ")[0]
    yield RagQuestion(f'Which {item.kind} does this describe: "{first[:160]}"?', name, module)
    for parameter, value in defaults.items():
        if value:
            question_text = f"What is the default value of the parameter {parameter} of {name}?"
            yield RagQuestion(question_text, value, module)


def _defaults(item: CodeObject) -> Iterator[tuple[str, str]]:
    """Yield each parameter with its default as written; an empty text for none or a long one."""
    (node,) = ast.parse(textwrap.dedent(item.code)).body
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return

    plain = [*node.args.posonlyargs, *node.args.args]

    # Defaults are those of the last positional parameters.
    missing: list[ast.expr | None] = [None] * (len(plain) - len(node.args.defaults))
    padded_defaults = [*missing, *node.args.defaults, *node.args.kw_defaults]
    for argument, default in zip([*plain, *node.args.kwonlyargs], padded_defaults, strict=True):
        text = ast.unparse(default) if default is not None else ""
        if argument.arg not in ("self", "cls"):
            yield argument.arg, text if len(text) <= 20 else ""


Order = Literal["score", "document", "shuffled", "free"]
PASSAGES = 8
HEAD = (
    "Answer the question from these passages of the documentation. Say so if they do not hold the"
    " answer."
)


class RagDataset:
    """One sample for each question, with passages by BM25 (Robertson and Zaragoza, 2009).

    A question that has its own passages keeps the first `passages` of these. The right answer is a
    note for readers and not scored.

    Parameters
    ----------
    path : str, optional
        SQuAD's JSON, JSON lines, or a folder of texts; by default the documentation of Python's
        standard library.
    seed : int
        Decides which topics are popular (the n-th has weight 1/n), and which question comes next. A
        recorded log keeps its order.
    passages : int
        Passages in a prompt.
    order : {"score", "document", "shuffled", "free"}
        `score`: best first; `document`: in the order of the corpus; `shuffled`: random, from the
        seed; `free`: as `score`, and a cache may arrange them (`Request.order`).

    Raises
    ------
    DatasetError
        For a corpus that cannot be read.
    ConfigError
        For an unknown order, and for less than one passage.
    MissingExtraError
        Without bm25s, if the corpus has passages.
    """

    def __init__(
        self,
        path: str | None = None,
        seed: int = 0,
        passages: int = PASSAGES,
        order: Order = "score",
    ) -> None:
        if order not in get_args(Order):
            raise ConfigError(
                f"--order {order!r} is unknown: choose one of {', '.join(get_args(Order))}"
            )
        if passages < 1:
            raise ConfigError(f"--passages {passages}: give 1 or more")

        self.corpus: PassageCorpus = docs_corpus() if path is None else read_corpus(path)
        self.seed, self.passages, self.order = seed, passages, order
        self._retriever: Any = _index(self.corpus.passages) if self.corpus.passages else None

    def __iter__(self) -> Iterator[Sample]:
        questions = (
            self.corpus.questions
            if self.corpus.recorded
            else tuple(traffic(self.corpus.questions, self.seed))
        )
        for number, question in enumerate(questions):
            passages = self._arranged(number, question)
            shown = [_shown(passage) for passage in passages]
            # A passage that stands twice in a corpus has no place of its own.
            free = self.order == "free" and len(set(shown)) == len(shown)
            yield Sample(
                id=f"rag-{number}",
                question=question.text,
                answer=question.answer,
                context="\n\n".join([HEAD, *shown]),
                fields={"topic": question.topic, "titles": [passage.title for passage in passages]},
                parts=tuple(shown) if free else (),
                scored=False,
            )

    def _arranged(self, number: int, question: RagQuestion) -> Sequence[Passage]:
        if question.retrieved:
            places, candidates = (
                list(range(len(question.retrieved)))[: self.passages],
                question.retrieved,
            )
        else:
            places, candidates = self._best(question.text), self.corpus.passages

        if self.order == "document":
            places.sort()
        if self.order == "shuffled":
            # Seeded by the number: the order in one prompt does not depend on those before.
            random.Random(f"rag/{self.seed}/{number}").shuffle(places)
        return [candidates[place] for place in places]

    def _best(self, question: str) -> list[int]:
        """Return the indices of the best passages, best first; ties in the order of the corpus."""
        scores = self._retriever.get_scores(words(question))
        return [int(place) for place in (-scores).argsort(kind="stable")[: self.passages]]


def traffic(questions: Sequence[RagQuestion], seed: int) -> Iterator[RagQuestion]:
    """Yield every question once, in a random order in which popular topics tend to come first.

    The n-th topic, in an order from the seed, is drawn with weight 1/n while it has questions.
    """
    rng = random.Random(f"rag/{seed}")
    topics: dict[str, list[RagQuestion]] = {}
    for question in questions:
        topics.setdefault(question.topic, []).append(question)
    remaining = list(topics.values())
    rng.shuffle(remaining)
    weights = [1 / (rank + 1) for rank in range(len(remaining))]

    for waiting in remaining:
        rng.shuffle(waiting)
    while remaining:
        (chosen,) = rng.choices(range(len(remaining)), weights)
        yield remaining[chosen].pop()
        if not remaining[chosen]:
            # With its weight, as only topics with a question may be drawn.
            del remaining[chosen], weights[chosen]


def words(text: str) -> list[str]:
    """Return the terms of BM25: words in lower case."""
    return re.findall(r"\w+", text.lower())


def _index(passages: Sequence[Passage]) -> Any:
    try:
        import bm25s
    except ImportError:
        raise MissingExtraError("bm25s", "rag", "retrieving passages") from None

    retriever = bm25s.BM25()
    retriever.index(
        [words(f"{passage.title} {passage.text}") for passage in passages], show_progress=False
    )
    return retriever


def _shown(passage: Passage) -> str:
    return (f"[{passage.title}]\n{passage.text}" if passage.title else passage.text).strip()

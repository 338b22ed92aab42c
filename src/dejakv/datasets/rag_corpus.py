"""Passages and questions of a retrieval workload, in one of three formats: SQuAD's JSON, JSON lines, a folder of texts."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejakv.datasets.lines import json_lines
from dejakv.errors import DatasetError

TEXTS = (".txt", ".md", ".rst")
WORDS = 120
"""Words in a passage cut from a text: paragraphs are joined up to this many."""

FORMS = (
    "SQuAD's JSON (data, paragraphs, context, qas), JSON lines with 'passage' or 'question', or a folder of "
    f"{', '.join(TEXTS)} files"
)


@dataclass(frozen=True)
class Passage:
    """A text that may be retrieved. `title`: its source."""

    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question, its answer if known, and its topic. `retrieved`: its own passages, best first."""

    text: str
    answer: str | None = None
    topic: str = ""
    retrieved: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """Passages to search and questions to ask. `recorded`: the questions are a log, and their order is kept."""

    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]
    recorded: bool = False


def read_corpus(path: str | Path) -> Corpus:
    """The corpus at a path, in any of the formats. Raises: DatasetError naming the line or key that does not fit."""
    source = Path(path).expanduser()
    if source.is_dir():
        return _folder(source)
    if not source.is_file():
        raise DatasetError(f"no file or folder {str(path)!r}: give {FORMS} with --dataset-path")
    if source.suffix == ".json":
        return _squad(source)
    return _checked(source, *_lines(source), recorded=True)


def _squad(file: Path) -> Corpus:
    passages: list[Passage] = []
    questions: list[Question] = []
    try:
        for article in json.loads(file.read_text(encoding="utf-8"))["data"]:
            title = str(article.get("title", ""))
            for paragraph in article["paragraphs"]:
                passages.append(Passage(title, paragraph["context"]))
                for asked in paragraph["qas"]:
                    answers = asked.get("answers") or [{"text": None}]
                    questions.append(Question(asked["question"], answers[0]["text"], title))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DatasetError(f"{file.name} is not in SQuAD's format ({error!r}): give {FORMS}") from error
    return _checked(file, passages, questions)


def _lines(file: Path) -> tuple[list[Passage], list[Question]]:
    passages: list[Passage] = []
    questions: list[Question] = []
    for where, record in json_lines(file):
        text = record.get("passage", record.get("text"))
        if isinstance(record.get("question"), str):
            answer = record.get("answer")
            given = tuple(_passage(item, where) for item in record.get("passages") or ())
            questions.append(Question(record["question"], None if answer is None else str(answer), retrieved=given))
        elif isinstance(text, str):
            passages.append(Passage(str(record.get("title", "")), text))
        else:
            raise DatasetError(f"{where} has neither a text 'passage' nor a text 'question': give {FORMS}")
    return passages, questions


def _passage(item: Any, where: str) -> Passage:
    text = item.get("text", item.get("passage")) if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise DatasetError(
            f"{where}: an item of 'passages' is neither a text nor an object with 'text': give one of them"
        )
    return Passage(str(item.get("title", "")) if isinstance(item, dict) else "", text)


def _folder(folder: Path) -> Corpus:
    passages: list[Passage] = []
    for file in sorted(path for path in folder.rglob("*") if path.suffix.lower() in TEXTS and path.is_file()):
        title = file.relative_to(folder).as_posix()
        passages += [Passage(title, text) for text in _pieces(file.read_text(encoding="utf-8", errors="replace"))]
    asked = folder / "questions.jsonl"
    if asked.is_file():
        more, questions = _lines(asked)
        return _checked(folder, passages + more, questions, recorded=True)
    return _checked(folder, passages, [question for passage in passages for question in go_on(passage)])


def _pieces(text: str) -> Iterator[str]:
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text):
        if piece and len(piece.split()) + len(paragraph.split()) > WORDS:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph.strip()}".strip()
    if piece:
        yield piece


def go_on(passage: Passage) -> Iterator[Question]:
    """Questions generated from a passage by a rule: how its longer sentences continue."""
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(passage.text.split())):
        words = sentence.split()
        if 10 <= len(words) <= 40:
            half = len(words) // 2
            asked = f'How does this sentence go on in the texts: "{" ".join(words[:half])}"?'
            yield Question(asked, " ".join(words[half:]), passage.title)


def _checked(source: Path, passages: list[Passage], questions: list[Question], recorded: bool = False) -> Corpus:
    if not questions:
        raise DatasetError(f"{source.name} has no question: give {FORMS}")
    if not passages and not all(question.retrieved for question in questions):
        raise DatasetError(f"{source.name} has no passage: give {FORMS}")
    return Corpus(tuple(passages), tuple(questions), recorded)

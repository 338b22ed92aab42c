"""Data sets from files of one's own: JSON lines of requests, and folders of pictures."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.datasets.messages import read_request
from dejakv.errors import DatasetError, InputError
from dejakv.pictures import checked
from dejakv.request import Media


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place of each object (`log.jsonl line 3`), and the object. Empty lines are skipped.

    Raises: DatasetError naming the line, if a line is not a JSON object in UTF-8.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file.name} line {number}"
            try:
                record: Any = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise DatasetError(f"{where} is not JSON ({error}): write one object a line") from error
            if not isinstance(record, dict):
                raise DatasetError(f"{where} is not an object: write one object a line")
            yield where, record


SUFFIXES = (".jpg", ".png", ".jpeg", ".webp")


def media_from_file(path: Path) -> Media:
    """Reads a picture. Raises InputError where the file is missing or not a picture."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the image {path.name}: {error.strerror}; check --image-root") from error
    return checked(data, path.name)[0]


def inside(root: Path, name: str) -> Path:
    """`root / name`, or DatasetError if that lies outside of `root`."""
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise DatasetError(f"the image path {name!r} leaves the folder {str(root)!r}: give paths below --image-root")
    return path


def by_id(root: Path, image_id: str) -> Path | None:
    """The picture `<image_id>.jpg|.png|...` below `root`, None if there is none."""
    for suffix in SUFFIXES:
        path = inside(root, image_id + suffix)
        if path.is_file():
            return path
    return None


class JsonlDataset:
    """One sample a line. Image paths are relative to `image_root` (the file's own folder if not given).

    Raises: DatasetError naming the line, for a line that is not a JSON object or has no question.
    """

    name = "jsonl"

    def __init__(self, path: str | Path, image_root: str | Path | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise DatasetError(f"no file {str(path)!r}: give a .jsonl file with --dataset-path")
        self.image_root = Path(image_root) if image_root else self.path.parent

    def __iter__(self) -> Iterator[Sample]:
        for where, record in json_lines(self.path):
            yield self._sample(where, record)

    def _sample(self, where: str, record: dict[str, Any]) -> Sample:
        messages: tuple[tuple[str, str], ...] = ()
        question = record.get("question", record.get("prompt"))
        if question is None and "messages" in record:
            messages = tuple((message.role, message.text) for message in read_request(record, where))
            question = messages[-1][1]
        if not isinstance(question, str):
            raise DatasetError(
                f"{where} has no request: give a text field 'question' or 'prompt', or a list 'messages'"
            )
        images = record.get("images") or ([record["image"]] if record.get("image") else [])
        if not isinstance(images, list) or not all(isinstance(name, str) and name.isprintable() for name in images):
            raise DatasetError(f"{where}: give a path as 'image', or a list of paths as 'images'")
        media = tuple(media_from_file(inside(self.image_root, name)) for name in images)
        answer = record.get("answer")
        return Sample(
            id=str(record.get("id", where.rpartition(" ")[2])),
            question=question,
            answer=None if answer is None else str(answer),
            media=media,
            context=str(record.get("context", "")),
            messages=messages,
            fields=record,
        )


DEFAULT_QUESTIONS = ("What is in the picture?", "Describe the picture in one sentence.")


class FolderDataset:
    """Pictures of a folder in the order of their names; `NAME.txt` beside `NAME.jpg` has one question a line,
    with an optional answer after a tab. Pictures without one are asked `questions`."""

    name = "folder"

    def __init__(self, path: str | Path, questions: Sequence[str] = DEFAULT_QUESTIONS) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DatasetError(f"no folder {str(path)!r}: give a folder of pictures with --dataset-path")
        self.questions = tuple(questions)

    def __iter__(self) -> Iterator[Sample]:
        pictures = sorted(path for path in self.path.iterdir() if path.suffix.lower() in SUFFIXES)
        if not pictures:
            raise DatasetError(f"no picture in {str(self.path)!r}: put {', '.join(SUFFIXES)} files there")
        for picture in pictures:
            media = media_from_file(picture)
            for number, (question, answer) in enumerate(self._questions(picture)):
                fields = {"imageId": picture.stem}
                yield Sample(f"{picture.stem}-{number}", question, answer, (media,), fields=fields)

    def _questions(self, picture: Path) -> Iterator[tuple[str, str | None]]:
        beside = picture.with_suffix(".txt")
        if not beside.is_file():
            yield from ((question, None) for question in self.questions)
            return
        for line in beside.read_text(encoding="utf-8").splitlines():
            question, _, answer = line.partition("\t")
            if question.strip():
                yield question.strip(), answer.strip() or None

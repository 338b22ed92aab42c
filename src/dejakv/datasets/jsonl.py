"""Requests from a JSON-lines file: `question`, `prompt` or `messages`, and optionally `image` (path), `answer`, `id`, `context`,
`partition` and any other field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.datasets.images import inside, media_from_file
from dejakv.datasets.lines import json_lines
from dejakv.datasets.messages import read_request
from dejakv.errors import DatasetError


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

"""A folder of pictures: every question is asked of every picture. A text file beside a picture may list its own questions."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dejakv.datasets.base import Sample
from dejakv.datasets.images import SUFFIXES, media_from_file
from dejakv.errors import DatasetError

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

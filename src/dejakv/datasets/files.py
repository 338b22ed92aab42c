"""Files of the user's own: JSON, JSON lines, pictures, and a data set of a folder of pictures."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.errors import DatasetError
from dejakv.pictures import SUFFIXES, inside, media_from_file
from dejakv.request import Media


def read_json(file: Path, form: str) -> Any:
    """Read a JSON file in UTF-8; a DatasetError names the `form` to give instead."""
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file.name} is not JSON ({error}): {form}") from error


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each object (`log.jsonl line 3`), and the object; empty lines are skipped.

    Raises
    ------
    DatasetError
        If a line is not a JSON object in UTF-8; it names the line.
    """
    with file.open("rb") as lines:
        # Bytes, so that text which is not UTF-8 is an error of its line.
        for number, line in enumerate(lines, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            where = f"{file.name} line {number}"
            try:
                record: Any = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise DatasetError(
                    f"{where} is not JSON ({error}): write one object a line"
                ) from error
            if not isinstance(record, dict):
                raise DatasetError(f"{where} is not an object: write one object a line")
            yield where, record


def pictures_in(record: Mapping[str, Any], root: Path) -> tuple[Media, ...]:
    """Return the pictures that a record names by paths below `root`, in `image` or `images`.

    Raises
    ------
    DatasetError
        For other values than paths, and for a path that leaves `root`.
    InputError
        For a file that is missing or no picture.
    """
    names = record.get("images") or ([record["image"]] if record.get("image") else [])
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name.isprintable() for name in names
    ):
        raise DatasetError("give a path as 'image', or a list of paths as 'images'")
    return tuple(media_from_file(inside(root, name)) for name in names)


QUESTIONS = ("What is in the picture?", "Describe the picture in one sentence.")


class FolderDataset:
    """Pictures of a folder in the order of their names.

    `NAME.txt` beside `NAME.jpg` has one question a line, with an optional answer after a tab.
    Pictures without one are asked `QUESTIONS`. Folders in the folder are not searched.

    Raises
    ------
    DatasetError
        For a path that is no folder, and on iteration for a folder without pictures.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DatasetError(
                f"no folder {str(path)!r}: give a folder of pictures with --dataset-path"
            )

    def __iter__(self) -> Iterator[Sample]:
        pictures = sorted(path for path in self.path.iterdir() if path.suffix.lower() in SUFFIXES)
        if not pictures:
            raise DatasetError(
                f"no picture in {str(self.path)!r}: put {', '.join(SUFFIXES)} files there"
            )

        for picture in pictures:
            media = media_from_file(picture)
            beside = picture.with_suffix(".txt")
            question_lines = (
                beside.read_text(encoding="utf-8").splitlines() if beside.is_file() else QUESTIONS
            )
            for number, line in enumerate(
                line for line in question_lines if line.partition("\t")[0].strip()
            ):
                question, _, answer = (text.strip() for text in line.partition("\t"))
                fields = {"imageId": picture.stem}
                yield Sample(
                    f"{picture.stem}-{number}", question, answer or None, (media,), fields=fields
                )

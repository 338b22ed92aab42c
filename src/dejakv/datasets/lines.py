"""JSON lines, with the number of each line for messages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dejakv.errors import DatasetError


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each object stands (`log.jsonl line 3`), and the object. Empty lines are passed over.

    Raises: DatasetError naming the line, for one that is not a JSON object, and for a file without any.
    """
    found = False
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(_decoded(file, lines), 1):
            if not line.strip():
                continue
            where = f"{file.name} line {number}"
            try:
                record: Any = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise DatasetError(f"{where} is not JSON ({error}): write one object a line") from error
            if not isinstance(record, dict):
                raise DatasetError(f"{where} is not an object: write one object a line")
            found = True
            yield where, record
    if not found:
        raise DatasetError(f"{file.name} is empty: write one object a line")


def _decoded(file: Path, lines: Iterator[str]) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise DatasetError(f"{file.name} is not UTF-8 text ({error}): give a file of JSON lines") from error

"""JSON lines, with the number of each line for error messages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dejakv.errors import DatasetError


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

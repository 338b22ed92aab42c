"""Logs of requests as servers and gateways write them: one entry for each request.

A line that cannot be read costs that line, and a file is read line by line. Read are JSON lines of
prompts or messages, vLLM's log of requests, OpenAI's batch files, exports of Langfuse and logs of
LiteLLM (JSON lines or an array), and the traces of Mooncake and Azure, which have no text.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.datasets.entries import (
    LIMITS,
    TRACES,
    Entry,
    Format,
    Skipped,
    load_json,
    of_azure,
    of_line,
    of_record,
    token_ids,
)
from dejakv.datasets.files import pictures_in
from dejakv.errors import DatasetError, DejaKVError, count_noun

MAX_LINE_CHARACTERS = 64 << 20
"""Characters of a line; a longer one is left out."""
MAX_BROKEN_REASONS = 100
"""Lines that could not be read whose reason is kept."""

_COMPRESSED = "it is compressed or no text ({}): unpack it, and write one JSON object a line"
_MAGIC = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PAR1": "Parquet", b"SQLite format 3": "SQLite",
    b"ARROW1": "Arrow", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
_PRETTY = re.compile(r'\{\s*("[^"]*"\s*:\s*[\[{]?\s*)?[\r\n]')
_HEADER = re.compile(r'"?[A-Za-z_][\w .()-]*"?([,;\t]"?[A-Za-z_][\w .()-]*"?)+\s*?[\r\n]')


@dataclass
class RequestLog:
    """File of requests, or a part of one.

    Attributes
    ----------
    path : Path
        The file.
    image_root : Path or None
        Folder of the pictures that JSON lines name; without it they are left out.
    begin, end : int
        The part's bytes; `end` None stands for the whole file.
    first : int
        Number of the part's first line.
    formats : Counter[Format]
        Entries of each format that were read so far.
    broken : dict[int, str]
        The first lines that could not be read, and why; none has a prompt's text.
    unread : int
        Lines that could not be read so far.
    skipped : Counter[Skipped]
        Lines so far that are no requests to a model, by what they are.
    partly : Counter[str]
        Requests so far that lack a part of their prompt, by the name of what they lack.
    without_tenant : int
        Requests so far that do not tell whose they are.
    undated : int
        Requests so far that do not tell when they were.

    Raises
    ------
    DatasetError
        For a path that is no file.
    """

    path: Path
    image_root: Path | None = None
    begin: int = 0
    end: int | None = None
    first: int = 1
    formats: Counter[Format] = field(default_factory=Counter[Format])
    broken: dict[int, str] = field(default_factory=dict[int, str])
    unread: int = 0
    skipped: Counter[Skipped] = field(default_factory=Counter[Skipped])
    partly: Counter[str] = field(default_factory=Counter[str])
    without_tenant: int = 0
    undated: int = 0

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        if not self.path.is_file():
            raise DatasetError(f"no file {str(self.path)!r}: give a log with one request a line")

    def entries(self) -> Iterator[Entry]:
        """Yield the readable requests in the order of the file.

        Other lines are counted in `unread` and `skipped`.
        """
        for place, line_content in self.read():
            self.count_line(place, line_content)
            if isinstance(line_content, Entry):
                yield line_content

    def read(self) -> Iterator[tuple[int, Entry | str]]:
        """Yield the number of each line with its content.

        The content is the request, what stands in its place (`Skipped`), or the reason why it
        cannot be read.
        """
        for place, read in self._lines():
            try:
                line_content = read()
                whole = (
                    self._with_tenant_and_media(line_content)
                    if isinstance(line_content, Entry)
                    else line_content
                )
            except DejaKVError as error:
                yield place, str(error)
            except json.JSONDecodeError as error:
                yield (
                    place,
                    (
                        f"it is no JSON object from column {error.colno} on: write each request on"
                        " one line (jq -c . does)"
                    ),
                )
            except (
                ValueError,
                TypeError,
                AttributeError,
                LookupError,
                ArithmeticError,
                RecursionError,
                SyntaxError,
                MemoryError,
            ) as error:
                yield (
                    place,
                    f"it has a value that no request has ({type(error).__name__}): remove the line",
                )
            else:
                yield place, whole

    def count_line(self, place: int, line_content: Entry | str) -> None:
        """Add a line's content, as `read` gives it, to the counts and reasons of the log."""
        if isinstance(line_content, Entry):
            self.formats[line_content.format] += 1
            self.partly.update(line_content.left_out)
            self.without_tenant += not line_content.tenant
            self.undated += line_content.time is None
        elif isinstance(line_content, Skipped):
            self.skipped[line_content] += 1
        else:
            self.unread += 1
            # A file of another kind is broken in every line.
            if len(self.broken) < MAX_BROKEN_REASONS:
                self.broken[place] = line_content

    @property
    def left_out(self) -> list[str]:
        """What was left out so far, and what requests do not tell, in a sentence each."""
        sentences: list[str] = []
        total = self.formats.total()
        if self.unread:
            place, why = next(iter(self.broken.items()))
            sentences.append(
                f"left out: {count_noun(self.unread, 'line')} that cannot be read, the first at"
                f" {place}: {why}"
            )
        for label, count in self.skipped.most_common():
            noun, _, qualifier = label.partition(" ")
            sentences.append(f"left out: {count_noun(count, noun)} {qualifier}")
        for label, count in self.partly.most_common():
            sentences.append(
                f"not counted: {label}, in {count:,} of {count_noun(total, 'request')}"
                f" ({count / total:.0%})"
            )

        if self.without_tenant and self.formats.keys() - TRACES:
            sentences.append(
                f"without partition or user: {self.without_tenant:,} of"
                f" {count_noun(total, 'request')}, which count as one tenant's"
            )

        if self.undated:
            sentences.append(
                f"without a time: {self.undated:,} of {count_noun(total, 'request')}, so all are"
                " taken in the order of the file"
            )
        return sentences

    def parts(self, size: int) -> "list[RequestLog]":
        """Return the file in parts of whole lines.

        A part has `size` bytes and the rest of its last line; the last part may be shorter. A JSON
        array, a table or a file that cannot be read is one part.
        """
        with self.path.open("rb") as file:
            if _shape(file.read(4096)) != "lines":
                return [self]
            file.seek(0)
            log_parts, begin, first = list[RequestLog](), 0, 1
            # readline completes the last line, so that none is cut in two.
            while piece := file.read(size) + file.readline():
                log_parts.append(
                    RequestLog(self.path, self.image_root, begin, begin + len(piece), first)
                )
                begin += len(piece)
                # Lines end with LF, CR or both, as when the part is read.
                first += piece.count(b"\n") + piece.count(b"\r") - piece.count(b"\r\n")

        return log_parts

    def __iter__(self) -> Iterator[Sample]:
        """Yield the requests that have a text; a DatasetError tells of a trace, which has none."""
        for entry in self.entries():
            if entry.sample is None:
                raise DatasetError(f"{LIMITS[entry.format]}: it can be estimated, and not run")
            yield entry.sample

    def _with_tenant_and_media(self, entry: Entry) -> Entry:
        """Return the entry with its tenant and its pictures in its sample."""
        if entry.sample is None:
            return entry

        fields, root = dict(entry.sample.fields), self.image_root

        # A field of that name with other content would be run as ids.
        if not token_ids(fields.get("token_ids")):
            fields.pop("token_ids", None)
        if entry.tenant:
            fields["partition"] = entry.tenant
        named = entry.format == "JSON lines" and bool(fields.get("image") or fields.get("images"))
        media = pictures_in(fields, root) if root is not None and named else ()
        left_out = (*entry.left_out, "pictures") if named and root is None else entry.left_out
        return replace(
            entry,
            sample=replace(entry.sample, fields=fields, media=media),
            left_out=tuple(dict.fromkeys(left_out)),
        )

    def _lines(self) -> Iterator[tuple[int, Callable[[], Entry | Skipped]]]:
        shape = "lines"
        # A part begins anywhere, and only lines are given in parts.
        if self.end is None:
            with self.path.open("rb") as file:
                shape = _shape(file.read(4096))

        with self._text() as lines:
            if shape == "array":
                for place, text in enumerate(_elements(lines.read), 1):
                    yield place, partial(_element, place, text)
            elif shape == "table":
                for place, row in enumerate(_rows(lines), 2):
                    yield place, partial(of_azure, place, row)
            elif shape != "lines":
                yield 1, partial(_refuse, shape)
            else:
                for place, line in enumerate(iter(partial(_whole_line, lines), ""), self.first):
                    if line.strip("\ufeff \t\r\n\0"):
                        yield place, partial(of_line, place, line)

    def _text(self) -> io.TextIOBase:
        file: Any = self.path.open("rb")
        # A part is read into memory, as a text file has no end before that of its file.
        if self.end is not None:
            with file:
                file.seek(self.begin)
                file = io.BytesIO(file.read(self.end - self.begin))
        return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")


def _shape(head: bytes) -> str:
    """Tell a file's shape by its first bytes: `array`, `table`, `lines`, or what is wrong."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return _COMPRESSED.format(name)
    begin = head.decode(errors="replace").lstrip("\ufeff \r\n\t")
    if begin.startswith("["):
        return "array"

    # A first line of names between commas is a table's.
    if _HEADER.match(begin):
        columns = {name.strip(' "').upper() for name in re.split(r"[,;\t]", begin.splitlines()[0])}
        if {"TIMESTAMP", "CONTEXTTOKENS"} <= columns:
            return "table"
        if {"TIMESTAMP", "REQUEST TOKENS"} <= columns:
            return (
                "it is a trace of BurstGPT: rename its columns Timestamp and Request tokens to"
                " TIMESTAMP and ContextTokens"
            )
        return (
            "it is a table (CSV): write it as JSON lines, one object with 'prompt' or 'messages'"
            " for each request"
        )

    if _PRETTY.match(begin):
        return (
            "it is JSON over several lines: write one request a line (jq -c . FILE, or jq -c"
            " '.NAME[]' FILE for those in a list)"
        )
    return "lines"


def _refuse(why: str) -> Entry:
    raise DatasetError(why)


def _rows(lines: io.TextIOBase) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table; what is no row is empty."""
    rows = csv.DictReader(lines)
    rows.fieldnames = [name.strip().upper() for name in rows.fieldnames or ()]

    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error:
            yield {}


def _whole_line(lines: io.TextIOBase) -> str:
    """Return the next line; of a too long one the beginning, which is no request."""
    line = rest = lines.readline(MAX_LINE_CHARACTERS)
    # Read past it in pieces, so that it is never in memory as a whole.
    while len(rest) == MAX_LINE_CHARACTERS and not rest.endswith("\n"):
        rest = lines.readline(MAX_LINE_CHARACTERS)
        line = line[:1]
    return line


def _elements(read: Callable[[int], str]) -> Iterator[str]:
    """Yield the elements of a JSON array, without holding the array.

    An element is the text up to each comma or bracket at the outermost level.
    """
    depth, quoted, escaped, pending = 0, False, False, list[str]()
    while piece := read(1 << 16):
        begin = 0
        for place, letter in enumerate(piece):
            # Commas and brackets in a string separate nothing.
            if quoted:
                quoted, escaped = escaped or letter != '"', letter == "\\" and not escaped
            elif letter == '"':
                quoted = True
            elif letter in "[{":
                depth += 1
                begin = place + 1 if depth == 1 else begin
            elif letter in "]}" or (letter == "," and depth == 1):
                depth -= letter != ","
                if depth == 0 or (depth == 1 and letter == ","):
                    text = "".join((*pending, piece[begin:place])).strip()
                    pending, begin = [], place + 1
                    if text:
                        yield text
        # Behind the array's end there is nothing to keep.
        if depth:
            pending.append(piece[begin:])

    if text := "".join(pending).strip():
        # The file ends within this element.
        yield text


def _element(place: int, text: str) -> Entry | Skipped:
    return of_record(place, load_json(text))

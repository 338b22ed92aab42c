"""Logs of requests as servers and gateways write them: one entry for each request, whatever the format. A line that cannot be read costs
that line, and a file is read line by line.

Read are JSON lines of prompts or messages, vLLM's log of requests, OpenAI's batch files, exports of Langfuse and logs of LiteLLM (JSON
lines or an array), and the traces of Mooncake and Azure, which have no text.
"""

import ast
import csv
import datetime
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from dejakv.datasets.base import Sample
from dejakv.datasets.files import pictures_in
from dejakv.datasets.messages import read_request
from dejakv.errors import DatasetError, DejaKVError, counted

Format = Literal[
    "JSON lines", "vLLM's log", "OpenAI batch", "Langfuse export", "LiteLLM log", "Mooncake trace", "Azure trace"
]

MOONCAKE_BLOCK = 512
"""Tokens of a block of a Mooncake trace."""

LONGEST_LINE = 64 << 20
"""Characters of a line; a longer one is left out."""
MOST_NAMED = 100
"""Lines that could not be read whose reason is kept."""

LIMITS: Mapping[Format, str] = {
    "JSON lines": "JSON lines tell whose a request was only by partition or user, and when only by timestamp",
    "OpenAI batch": "an OpenAI batch tells neither whose its requests were nor when: all count as one tenant's, in the order of the file",
    "Langfuse export": "prompts are in an export of Langfuse only of generations that it stored",
    "vLLM's log": "prompts are in vLLM's log at level DEBUG alone (--enable-log-requests), cut at --max-log-len if that is given",
    "LiteLLM log": "prompts are in LiteLLM's log where it stores them (store_prompts_in_spend_logs)",
    "Mooncake trace": "a Mooncake trace has prefix blocks alone: what stands elsewhere in earlier prompts, and what blend would save, is unknown",
    "Azure trace": "an Azure trace has times and lengths alone: what was asked before is unknown",
}
"""What a format does not say."""

TENANT = ("partition", "tenant", "end_user", "user_api_key_hash", "api_key", "userId", "user_id", "user")
TIME = ("timestamp", "startTime", "start_time", "created_at", "time")
_VLLM = re.compile(r"Request (\S+) details: prompt: (.*), prompt_token_ids: (\[[\d, ]*\]|None), prompt_embeds")
_VLLM_BODY = re.compile(r"Request \S+ JSON body: (\{.*)$")
_VLLM_TIME = re.compile(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")


@dataclass(frozen=True)
class Entry:
    """One request; what its format does not have is None or empty.

    place      of the line in the file, from 1 on
    sample     its text, with `token_ids` among the fields where the log has them
    blocks     of a Mooncake trace: ids of its blocks, each of the whole beginning of the prompt
    tokens     length of a prompt without text
    tenant     whose request it is
    time       of its arrival, in seconds
    """

    place: int
    format: Format
    sample: Sample | None = None
    blocks: tuple[int, ...] = ()
    tokens: int = 0
    tenant: str = ""
    time: float | None = None


@dataclass
class Log:
    """A file of requests, or a part of one.

    image_root  folder of the pictures that JSON lines name; None: they are left out
    begin, end  the part's bytes; `end` None: the whole file
    first       place of its first line
    formats     entries of each format that were read so far
    broken      the first lines that could not be read, and why; none has a prompt's text
    unread      lines that could not be read so far
    skipped     entries so far that are no requests: spans of a trace, lines of a server's log on something else
    """

    path: Path
    image_root: Path | None = None
    begin: int = 0
    end: int | None = None
    first: int = 1
    formats: Counter[Format] = field(default_factory=Counter[Format])
    broken: dict[int, str] = field(default_factory=dict[int, str])
    unread: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        if not self.path.is_file():
            raise DatasetError(f"no file {str(self.path)!r}: give a log with one request a line")

    def entries(self) -> Iterator[Entry]:
        """Yield the readable requests in the order of the file. Other lines are counted in `unread` and `skipped`."""
        for place, found in self.read():
            self.count(place, found)
            if isinstance(found, Entry):
                yield found

    def read(self) -> Iterator[tuple[int, Entry | str | None]]:
        """Places, each with its request, with the reason why it cannot be read, or with None for what is no request."""
        for place, read in self._lines():
            try:
                found = read()
                whole = self._whole(found) if found is not None else None
            except (ValueError, TypeError, AttributeError, LookupError, RecursionError, DatasetError) as error:
                yield place, str(error) if isinstance(error, DejaKVError) else type(error).__name__
            else:
                yield place, whole

    def count(self, place: int, found: Entry | str | None) -> None:
        """Counts what `read` found."""
        if isinstance(found, Entry):
            self.formats[found.format] += 1
        elif found is None:
            self.skipped += 1
        else:
            self.unread += 1
            if len(self.broken) < MOST_NAMED:
                self.broken[place] = found

    @property
    def left_out(self) -> list[str]:
        """What was left out so far, in a sentence each."""
        told: list[str] = []
        if self.unread:
            place, why = next(iter(self.broken.items()))
            told.append(f"left out: {counted(self.unread, 'line')} that cannot be read, the first at {place}: {why}")
        if self.skipped:
            told.append(f"left out: {counted(self.skipped, 'line')} on something else than a request")
        return told

    def parts(self, size: int) -> "list[Log]":
        """The file in parts of at least `size` bytes, cut at ends of lines; one part if it is not a file of lines."""
        with self.path.open("rb") as file:
            if _shape(file.read(4096).decode(errors="replace")) != "lines":
                return [self]
            file.seek(0)
            found, begin, first = list[Log](), 0, 1
            while piece := file.read(size) + file.readline():
                found.append(Log(self.path, self.image_root, begin, begin + len(piece), first))
                begin += len(piece)
                first += piece.count(b"\n") + piece.count(b"\r") - piece.count(b"\r\n")
        return found

    def __iter__(self) -> Iterator[Sample]:
        """The requests that have a text. Raises: DatasetError for a trace without any."""
        for entry in self.entries():
            if entry.sample is None:
                raise DatasetError(f"{LIMITS[entry.format]}: it can be estimated, and not run")
            yield entry.sample

    def _whole(self, entry: Entry) -> Entry:
        """The entry with its tenant and its pictures in its sample."""
        if entry.sample is None:
            return entry
        fields, root = dict(entry.sample.fields), self.image_root
        if entry.tenant:
            fields["partition"] = entry.tenant
        media = pictures_in(fields, root) if root is not None and entry.format == "JSON lines" else ()
        return replace(entry, sample=replace(entry.sample, fields=fields, media=media))

    def _lines(self) -> Iterator[tuple[int, Callable[[], Entry | None]]]:
        with self._text() as lines:
            shape = "lines" if self.end is not None else _shape(lines.read(4096))
            lines.seek(0)
            if shape == "array":
                for place, text in enumerate(_elements(lines.read), 1):
                    yield place, lambda place=place, text=text: _entry(place, json.loads(text))
            elif shape == "table":
                for place, row in enumerate(csv.DictReader(lines), 2):
                    yield place, lambda place=place, row=row: _of_azure(place, row)
            else:
                for place, line in enumerate(iter(partial(_whole_line, lines), ""), self.first):
                    if line.strip():
                        yield place, lambda place=place, line=line: _of_line(place, line)

    def _text(self) -> io.TextIOBase:
        file: Any = self.path.open("rb")
        if self.end is not None:
            with file:
                file.seek(self.begin)
                file = io.BytesIO(file.read(self.end - self.begin))
        return io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")


def _shape(begin: str) -> Literal["array", "table", "lines"]:
    """Of a file, by its first letters."""
    begin = begin.lstrip("\ufeff \r\n\t")
    if begin.startswith("["):
        return "array"
    return "table" if begin.upper().startswith("TIMESTAMP,") else "lines"


def _whole_line(lines: io.TextIOBase) -> str:
    """The next line; of a too long one the beginning, which is no request."""
    line = rest = lines.readline(LONGEST_LINE)
    while len(rest) == LONGEST_LINE and not rest.endswith("\n"):
        rest = lines.readline(LONGEST_LINE)
        line = line[:1]
    return line


def _elements(read: Callable[[int], str]) -> Iterator[str]:
    """The elements of a JSON array, without holding it: text up to each comma or bracket at the outermost level."""
    depth, quoted, escaped, held = 0, False, False, list[str]()
    while piece := read(1 << 16):
        begin = 0
        for place, letter in enumerate(piece):
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
                    text = "".join((*held, piece[begin:place])).strip()
                    held, begin = [], place + 1
                    if text:
                        yield text
        if depth:
            held.append(piece[begin:])


def _of_line(place: int, line: str) -> Entry | None:
    text = line.strip()
    if text.startswith("{"):
        return _entry(place, json.loads(text))
    if found := _VLLM.search(text):
        prompt, ids = ast.literal_eval(found[2]), ast.literal_eval(found[3])
        sample = _raw(found[1], prompt or "", ids)
        return Entry(place, "vLLM's log", sample, time=_vllm_time(text))
    if found := _VLLM_BODY.search(text):
        return Entry(place, "vLLM's log", _of_body(str(place), json.loads(found[1])), time=_vllm_time(text))
    if _VLLM_TIME.search(text):
        return None
    raise DatasetError("it is neither JSON nor a line of vLLM's log")


def _entry(place: int, record: Any) -> Entry | None:
    """Of a JSON object."""
    if not isinstance(record, dict):
        raise DatasetError("it is not an object")
    record = cast(dict[str, Any], record)
    if "hash_ids" in record:
        return Entry(
            place, "Mooncake trace", blocks=tuple(map(int, record["hash_ids"])), tokens=int(record["input_length"]),
            time=float(record.get("timestamp", 0)) / 1000,
        )  # fmt: skip
    common = {"tenant": _tenant(record), "time": _time(record)}
    if isinstance(body := record.get("body"), dict):
        return Entry(place, "OpenAI batch", _of_body(str(record.get("custom_id", place)), body), **common)
    if "input" in record and {"traceId", "trace_id", "startTime", "start_time", "type"} & set(record):
        if str(record.get("type", "GENERATION")).upper() != "GENERATION":
            return None
        return Entry(
            place, "Langfuse export", _of_input(str(record.get("id", place)), _parsed(record["input"])), **common
        )
    if "call_type" in record or ("startTime" in record and {"messages", "proxy_server_request"} & set(record)):
        asked = _parsed(record.get("messages")) or _parsed(record.get("proxy_server_request"))
        return Entry(
            place, "LiteLLM log", _of_input(str(record.get("id", record.get("request_id", place))), asked), **common
        )
    return Entry(place, "JSON lines", _plain(place, record), **common)


def _plain(place: int, record: dict[str, Any]) -> Sample:
    """`{"prompt": ...}`, `{"question": ..., "context": ...}`, `{"messages": [...]}` and their kind, with `image` or `images`."""
    answer = record.get("answer")
    answer, name = None if answer is None else str(answer), str(record.get("id", place))
    question = record.get("question", record.get("prompt"))
    if isinstance(question, str) and question.strip():
        return Sample(name, question, answer, context=str(record.get("context", "")), fields=record)
    if question is not None:
        raise DatasetError("its 'prompt' or 'question' is no text, or an empty one")
    return _of_messages(name, record, answer)


def _of_input(name: str, asked: Any) -> Sample:
    """What a gateway or a tracer kept of a request: a request's body, or its prompt."""
    if isinstance(asked, dict) and asked:
        return _of_body(name, cast(dict[str, Any], asked))
    return _of_prompt(name, asked, "its prompt was not stored")


def _of_body(name: str, body: Mapping[str, Any]) -> Sample:
    """The body of a completion, chat completion or response."""
    asked = body.get("messages", body.get("prompt", body.get("input")))
    return _of_prompt(name, asked, "its body has no prompt and no messages")


def _of_prompt(name: str, asked: Any, lacks: str) -> Sample:
    """A text, token ids or messages."""
    if isinstance(asked, str) and asked.strip():
        return _raw(name, asked)
    if isinstance(asked, list) and asked:
        ids = all(isinstance(each, int) for each in cast(list[Any], asked))
        return _raw(name, "", cast(list[int], asked)) if ids else _of_messages(name, {"messages": asked})
    raise DatasetError(lacks)


def _of_messages(name: str, record: Mapping[str, Any], answer: str | None = None) -> Sample:
    messages = tuple((message.role, message.text) for message in read_request(record, "it"))
    return Sample(name, messages[-1][1], answer, messages=messages, fields=record)


def _raw(name: str, prompt: str, ids: Sequence[int] | None = None) -> Sample:
    """A prompt as the model reads it."""
    if not prompt and not ids:
        raise DatasetError("its prompt was not stored")
    return Sample(name, prompt or "token ids", fields={"prompt": prompt, "token_ids": tuple(ids or ()), "raw": True})


def _of_azure(place: int, row: Mapping[str, str]) -> Entry:
    return Entry(place, "Azure trace", tokens=int(row["ContextTokens"]), time=_seconds(row["TIMESTAMP"]))


def _parsed(value: Any) -> Any:
    """A value that may be JSON in a string."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _tenant(record: Mapping[str, Any]) -> str:
    metadata = record.get("metadata")
    places = (record, cast(dict[str, Any], metadata) if isinstance(metadata, dict) else {})
    name, value = next(((name, each[name]) for name in TENANT for each in places if each.get(name)), ("", ""))
    return f"key {hashlib.sha256(str(value).encode()).hexdigest()[:8]}" if name == "api_key" else str(value)


def _time(record: Mapping[str, Any]) -> float | None:
    value = next((record[name] for name in TIME if record.get(name) is not None), None)
    try:
        return float(value) if isinstance(value, (int, float)) else _seconds(str(value)) if value is not None else None
    except ValueError:
        return None


def _seconds(text: str) -> float:
    """Of a time in ISO 8601, UTC unless it says otherwise; digits behind microseconds do not count."""
    time = datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.strip()))
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


def _vllm_time(line: str) -> float | None:
    """vLLM's log has no year: 2000 has every day."""
    if (found := _VLLM_TIME.search(line)) is None:
        return None
    month, day, hour, minute, second = map(int, found.groups())
    return datetime.datetime(2000, month, day, hour, minute, second, tzinfo=datetime.UTC).timestamp()

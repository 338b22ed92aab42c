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
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from dejakv.datasets.base import Sample
from dejakv.datasets.files import pictures_in
from dejakv.datasets.messages import SEEN, parsed, read_request, text_of, unnested, unseen
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
    "Langfuse export": "prompts are in an export of Langfuse only of generations that it stored",
    "vLLM's log": "prompts are in vLLM's log at level DEBUG alone (--enable-log-requests), cut at --max-log-len if that is given",
    "LiteLLM log": "prompts are in LiteLLM's log where it stores them (store_prompts_in_spend_logs)",
    "Mooncake trace": "a Mooncake trace has prefix blocks alone: what stands elsewhere in earlier prompts, and what blend would save, is unknown",
    "Azure trace": "an Azure trace has times and lengths alone: what was asked before is unknown",
}
"""What a format does not say."""
_TRACES = {"Mooncake trace", "Azure trace"}

TENANT = ("partition", "tenant", "end_user", "user_api_key_hash", "api_key", "userId", "user_id", "user")
TIME = ("timestamp", "startTime", "start_time", "created_at", "createdAt", "time", "ts", "@timestamp")
LATEST = 1e11
"""Seconds since 1970 below which a number is a time in seconds; up to a thousand times as much it is one in ms, and so on."""
MOST_TOKENS = 10**9
"""Tokens of a prompt, and a vocabulary; more are no count and no id."""
_VLLM = re.compile(r"Request (\S+) details: prompt: (.*), prompt_token_ids: (\[[\d, ]*\]|None), prompt_embeds")
_OLD_VLLM = re.compile(
    r"Received request (\S+): prompt: (.*), (?:sampling_)?params: \w+\(.*, prompt_token_ids: (\[[\d, ]*\]|None)"
)
_VLLM_BODY = re.compile(r"Request \S+ JSON body: (\{.*)$")
_VLLM_TIME = re.compile(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")

_COMPRESSED = "it is compressed or no text ({}): unpack it, and write one JSON object a line"
_MAGIC = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"PK\x03\x04": "a zip archive", b"BZh": "bzip2", b"\xfd7zXZ": "xz",
    b"PAR1": "Parquet", b"SQLite format 3": "SQLite", b"ARROW1": "Arrow", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
_PRETTY = re.compile(r'\{\s*("[^"]*"\s*:\s*[\[{]?\s*)?[\r\n]')
_HEADER = re.compile(r'"?[A-Za-z_][\w .()-]*"?([,;\t]"?[A-Za-z_][\w .()-]*"?)+\s*?[\r\n]')
_NO_PROMPT = re.compile(
    r"a?(embedding|rerank|moderation|transcription|speech|image_generation|image_edit)s?", re.IGNORECASE
)
_NO_PROMPT_URL = re.compile(r"/v\d+/(embeddings|rerank|moderations|audio|images|score|pooling|classify|tokenize)\b")
_REDACTED = "redacted-by-litellm"
_LISTS = ("data", "observations", "items", "requests", "rows", "results", "logs")
_OBSERVATIONS = (
    "GENERATION",
    "SPAN",
    "EVENT",
    "AGENT",
    "TOOL",
    "CHAIN",
    "RETRIEVER",
    "EVALUATOR",
    "EMBEDDING",
    "GUARDRAIL",
)


class Skipped(str):
    """What a line is in place of a request to a model that reads text: a noun, and what tells it apart."""


OTHER = Skipped("line on something else than a request")
SPAN = Skipped("span of a trace")
CACHED = Skipped("request that a cache answered")
FAILED = Skipped("request that failed")
EMBEDDED = Skipped("request for embeddings or the like")


@dataclass(frozen=True)
class Entry:
    """One request; what its format does not have is None or empty.

    place      of the line in the file, from 1 on
    sample     its text, with `token_ids` among the fields where the log has them
    blocks     of a Mooncake trace: ids of its blocks, each of the whole beginning of the prompt
    tokens     length of a prompt without text
    tenant     whose request it is
    time       of its arrival, in seconds
    left_out   names of what the model may have read and the sample lacks
    """

    place: int
    format: Format
    sample: Sample | None = None
    blocks: tuple[int, ...] = ()
    tokens: int = 0
    tenant: str = ""
    time: float | None = None
    left_out: tuple[str, ...] = ()


@dataclass
class Log:
    """A file of requests, or a part of one.

    image_root  folder of the pictures that JSON lines name; None: they are left out
    begin, end  the part's bytes; `end` None: the whole file
    first       place of its first line
    formats     entries of each format that were read so far
    broken      the first lines that could not be read, and why; none has a prompt's text
    unread      lines that could not be read so far
    skipped     lines so far that are no requests to a model, by what they are
    partly      requests so far that lack a part of their prompt, by the name of what they lack
    nobody      requests so far that do not tell whose they are; `undated`: when they were
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
    nobody: int = 0
    undated: int = 0

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

    def read(self) -> Iterator[tuple[int, Entry | str]]:
        """Places, each with its request, with what it is in its place (`Skipped`), or with the reason why it cannot be read."""
        for place, read in self._lines():
            try:
                found = read()
                whole = self._whole(found) if isinstance(found, Entry) else found
            except DejaKVError as error:
                yield place, str(error)
            except json.JSONDecodeError as error:
                yield (
                    place,
                    f"it is no JSON object from column {error.colno} on: write each request on one line (jq -c . does)",
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
                yield place, f"it has a value that no request has ({type(error).__name__}): remove the line"
            else:
                yield place, whole

    def count(self, place: int, found: Entry | str) -> None:
        """Counts what `read` found."""
        if isinstance(found, Entry):
            self.formats[found.format] += 1
            self.partly.update(found.left_out)
            self.nobody += not found.tenant
            self.undated += found.time is None
        elif isinstance(found, Skipped):
            self.skipped[found] += 1
        else:
            self.unread += 1
            if len(self.broken) < MOST_NAMED:
                self.broken[place] = found

    @property
    def left_out(self) -> list[str]:
        """What was left out so far, and what requests do not tell, in a sentence each."""
        told: list[str] = []
        total = self.formats.total()
        if self.unread:
            place, why = next(iter(self.broken.items()))
            told.append(f"left out: {counted(self.unread, 'line')} that cannot be read, the first at {place}: {why}")
        for what, count in self.skipped.most_common():
            noun, _, which = what.partition(" ")
            told.append(f"left out: {counted(count, noun)} {which}")
        for what, count in self.partly.most_common():
            told.append(f"not counted: {what}, in {count:,} of {counted(total, 'request')} ({count / total:.0%})")
        if self.nobody and self.formats.keys() - _TRACES:
            told.append(
                f"without partition or user: {self.nobody:,} of {counted(total, 'request')}, which count as one tenant's"
            )
        if self.undated:
            told.append(
                f"without a time: {self.undated:,} of {counted(total, 'request')}, so all are taken in the order of the file"
            )
        return told

    def parts(self, size: int) -> "list[Log]":
        """The file in parts of at least `size` bytes, cut at ends of lines; one part if it is not a file of lines."""
        with self.path.open("rb") as file:
            if _shape(file.read(4096)) != "lines":
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
        if not _ids(fields.get("token_ids")):
            fields.pop("token_ids", None)
        if entry.tenant:
            fields["partition"] = entry.tenant
        named = entry.format == "JSON lines" and bool(fields.get("image") or fields.get("images"))
        media = pictures_in(fields, root) if root is not None and named else ()
        left_out = (*entry.left_out, "pictures") if named and root is None else entry.left_out
        return replace(
            entry, sample=replace(entry.sample, fields=fields, media=media), left_out=tuple(dict.fromkeys(left_out))
        )

    def _lines(self) -> Iterator[tuple[int, Callable[[], Entry | Skipped]]]:
        shape = "lines"
        if self.end is None:
            with self.path.open("rb") as file:
                shape = _shape(file.read(4096))
        with self._text() as lines:
            if shape == "array":
                for place, text in enumerate(_elements(lines.read), 1):
                    yield place, partial(_element, place, text)
            elif shape == "table":
                for place, row in enumerate(_rows(lines), 2):
                    yield place, partial(_of_azure, place, row)
            elif shape != "lines":
                yield 1, partial(_refuse, shape)
            else:
                for place, line in enumerate(iter(partial(_whole_line, lines), ""), self.first):
                    if line.strip("\ufeff \t\r\n\0"):
                        yield place, partial(_of_line, place, line)

    def _text(self) -> io.TextIOBase:
        file: Any = self.path.open("rb")
        if self.end is not None:
            with file:
                file.seek(self.begin)
                file = io.BytesIO(file.read(self.end - self.begin))
        return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")


def _shape(head: bytes) -> str:
    """Of a file, by its first bytes: `array`, `table`, `lines`, or why it cannot be read."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return _COMPRESSED.format(name)
    begin = head.decode(errors="replace").lstrip("\ufeff \r\n\t")
    if begin.startswith("["):
        return "array"
    if _HEADER.match(begin):
        columns = {name.strip(' "').upper() for name in re.split(r"[,;\t]", begin.splitlines()[0])}
        if {"TIMESTAMP", "CONTEXTTOKENS"} <= columns:
            return "table"
        if {"TIMESTAMP", "REQUEST TOKENS"} <= columns:
            return "it is a trace of BurstGPT: rename its columns Timestamp and Request tokens to TIMESTAMP and ContextTokens"
        return "it is a table (CSV): write it as JSON lines, one object with 'prompt' or 'messages' for each request"
    if _PRETTY.match(begin):
        return "it is JSON over several lines: write one request a line (jq -c . FILE, or jq -c '.NAME[]' FILE for those in a list)"
    return "lines"


def _refuse(why: str) -> Entry:
    raise DatasetError(why)


def _rows(lines: io.TextIOBase) -> Iterator[Mapping[str, Any]]:
    """The rows of a table; one that is no row is empty."""
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
    if text := "".join(held).strip():
        yield text  # the file ends within it


def _element(place: int, text: str) -> Entry | Skipped:
    return _entry(place, _loaded(text))


def _loaded(text: str) -> Any:
    """JSON; halves of surrogate pairs, which are no text, become question marks."""
    found = json.loads(text)
    return json.loads(_whole_text(json.dumps(found, ensure_ascii=False))) if "\\ud" in text.lower() else found


def _whole_text(text: str) -> str:
    return text.encode(errors="replace").decode()


def _of_line(place: int, line: str) -> Entry | Skipped:
    text = line.strip("\ufeff \t\r\n\0\x1e")
    if text.startswith("{"):
        return _entry(place, _loaded(text))
    if found := _VLLM.search(text) or _OLD_VLLM.search(text):
        prompt, ids = ast.literal_eval(found[2]), ast.literal_eval(found[3])
        sample = _raw(found[1], _whole_text(str(prompt or "")), ids)
        return Entry(place, "vLLM's log", sample, time=_vllm_time(text))
    if found := _VLLM_BODY.search(text):
        body, left_out = _loaded(found[1]), list[str]()
        if why := _no_prompt({"body": body}):
            return why
        return Entry(
            place, "vLLM's log", _of_body(str(place), body, left_out), time=_vllm_time(text), left_out=tuple(left_out)
        )
    if _VLLM_TIME.search(text):
        return OTHER
    raise DatasetError("it is neither JSON nor a line of vLLM's log: write one JSON object a line")


def _entry(place: int, record: Any) -> Entry | Skipped:
    """Of a JSON object."""
    if not isinstance(record, dict):
        raise DatasetError("it is not an object: write each request as one")
    record = cast(dict[str, Any], record)
    if "hash_ids" in record:
        time = _moment(record.get("timestamp"), 1000)
        tokens = _count(record.get("input_length"), "input_length")
        return Entry(place, "Mooncake trace", blocks=tuple(map(int, record["hash_ids"])), tokens=tokens, time=time)
    if why := _no_prompt(record):
        return why
    name, kind = str(record.get("id", record.get("request_id", place))), str(record.get("type", "")).upper()
    left_out: list[str] = []
    if isinstance(body := parsed(record.get("body")), dict):
        name, form = str(record.get("custom_id", name)), "OpenAI batch"
        sample = _of_body(name, body, left_out)
    elif "input" in record and (
        {"traceId", "trace_id", "startTime", "start_time"} & set(record) or kind in _OBSERVATIONS
    ):
        if kind not in ("", "GENERATION"):
            return SPAN
        form, sample = "Langfuse export", _of_input(name, record["input"], left_out)
    elif "call_type" in record or ("startTime" in record and {"messages", "proxy_server_request"} & set(record)):
        form, sample = "LiteLLM log", _of_litellm(name, record, left_out)
    else:
        form, sample = "JSON lines", _plain(str(record.get("id", place)), record, left_out)
    return Entry(place, form, sample, tenant=_tenant(record), time=_time(record), left_out=tuple(left_out))


def _no_prompt(record: Mapping[str, Any]) -> Skipped | None:
    """What a record is if no model read a prompt for it."""
    body, response = (cast(Any, parsed(record.get(name))) for name in ("body", "response"))
    body = body if isinstance(body, dict) else {}
    code = response.get("status_code") if isinstance(response, dict) else record.get("status_code")
    names = [str(record.get(name) or "") for name in ("call_type", "type", "operation", "object")]
    urls = [str(record.get(name) or "") for name in ("url", "endpoint", "path")]
    if any(map(_NO_PROMPT.fullmatch, names)) or any(map(_NO_PROMPT_URL.search, urls)):
        return EMBEDDED
    if "messages" not in body and ("encoding_format" in body or "embed" in str(body.get("model", "")).lower()):
        return EMBEDDED
    if str(record.get("cache_hit")).lower() in ("true", "1"):
        return CACHED
    failed = (
        str(record.get("status")).lower() in ("failure", "failed", "error")
        or str(record.get("level")).upper() == "ERROR"
    )
    failed = failed or any(record.get(name) for name in ("error", "error_str", "exception"))
    return FAILED if failed or (isinstance(code, int) and code >= 400) else None


def _plain(name: str, record: dict[str, Any], left_out: list[str]) -> Sample:
    """`{"prompt": ...}`, `{"question": ..., "context": ...}`, `{"messages": [...]}` and their kind, with `image` or `images`."""
    answer = record.get("answer")
    answer = None if answer is None else str(answer)
    question = record.get("question", record.get("prompt"))
    if question is not None and not any(record.get(key) for key in SEEN):
        if not isinstance(question, str) or not question.strip():
            raise DatasetError("its 'prompt' or 'question' is no text, or an empty one: give a text, or 'messages'")
        left: set[str] = set(unseen(record))
        context = text_of(record.get("context"), left)
        left_out += sorted(left)
        return Sample(name, question, answer, context=context, fields=record)
    if unnested(record) is record and not any(record.get(key) for key in (*SEEN, "message", "query")):
        _refuse_answers(record)
    return _of_messages(name, record, left_out, answer)


def _refuse_answers(record: Mapping[str, Any]) -> None:
    """Raises: DatasetError with the remedy for records that are often taken for requests."""
    if "custom_id" in record:
        raise DatasetError("it is the output of a batch: give the batch's input, which has the prompts")
    if "choices" in record or record.get("object") in ("response", "chat.completion", "text_completion"):
        raise DatasetError("it is an answer without its prompt: log the bodies of requests")
    if key := next((key for key in _LISTS if isinstance(record.get(key), list)), None):
        raise DatasetError(f"its requests are in a list: write one a line (jq -c '.{key}[]' FILE)")


def _of_litellm(name: str, record: Mapping[str, Any], left_out: list[str]) -> Sample:
    """The request as the proxy got it, or the messages and parameters that it made of it."""
    body = parsed(record.get("proxy_server_request"))
    if not isinstance(body, dict) or not any(
        unnested(body).get(key) for key in ("messages", "prompt", "input", "contents")
    ):
        body = parsed(record.get("messages")) or ""
        if isinstance(body, list):
            given = (parsed(record.get(key)) for key in ("optional_params", "model_parameters"))
            extra = {
                key: value for each in given if isinstance(each, dict) for key, value in each.items() if key in SEEN
            }
            body = {**extra, "messages": body}
    if _REDACTED in json.dumps(body):
        raise DatasetError("its prompt was not stored (turn_off_message_logging)")
    return _of_input(name, body, left_out)


def _of_input(name: str, asked: Any, left_out: list[str]) -> Sample:
    """What a gateway or a tracer kept of a request: a request's body, also as JSON text, its messages, or its prompt as a text."""
    body = parsed(asked)
    if isinstance(body, dict) and (unnested(body) is not body or {"prompt", "question", *SEEN} & set(body)):
        return _of_body(name, cast(dict[str, Any], body), left_out)
    items: list[Any] = body if isinstance(body, list) else []
    if items and (not isinstance(asked, str) or all(isinstance(item, dict) for item in items)):
        return _of_prompt(name, items, left_out, "its prompt was not stored")
    return _of_prompt(name, asked, left_out, "its prompt was not stored")


def _of_body(name: str, body: Mapping[str, Any], left_out: list[str]) -> Sample:
    """The body of a completion, chat completion or response."""
    body = unnested(body)
    asked = body.get("prompt", body.get("question"))
    if isinstance(body.get("input"), list) and all(isinstance(each, int) for each in cast(list[Any], body["input"])):
        asked = cast(list[int], body["input"])
    elif any(body.get(key) for key in SEEN):
        return _of_messages(name, body, left_out)
    left_out += sorted(unseen(body))
    return _of_prompt(name, asked, left_out, "its body has no prompt and no messages")


def _of_prompt(name: str, asked: Any, left_out: list[str], lacks: str) -> Sample:
    """A text, token ids or messages."""
    if isinstance(asked, list) and len(cast(list[Any], asked)) == 1 and isinstance(asked[0], str):
        asked = cast(str, asked[0])
    if isinstance(asked, str) and asked.strip():
        return _raw(name, asked)
    if isinstance(asked, list) and asked:
        if any(isinstance(each, int) for each in cast(list[Any], asked)):
            return _raw(name, "", cast(list[int], asked))
        return _of_messages(name, {"messages": asked}, left_out)
    raise DatasetError(lacks)


def _of_messages(name: str, record: Mapping[str, Any], left_out: list[str], answer: str | None = None) -> Sample:
    left: set[str] = set(unseen(unnested(record)))
    messages = tuple((message.role, message.text) for message in read_request(record, "it", left))
    left_out += sorted(left)
    return Sample(name, messages[-1][1], answer, messages=messages, fields=record)


def _raw(name: str, prompt: str, ids: Sequence[int] | None = None) -> Sample:
    """A prompt as the model reads it."""
    if not prompt.strip() and not ids:
        raise DatasetError("its prompt was not stored")
    if ids and not _ids(ids):
        raise DatasetError("its prompt has numbers that are no token ids: give ids from 0 on, or a text")
    return Sample(
        name,
        (prompt.strip() and prompt) or "token ids",
        fields={"prompt": prompt, "token_ids": tuple(ids or ()), "raw": True},
    )


def _ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    listed = isinstance(value, list | tuple)
    return listed and all(type(each) is int and 0 <= each < MOST_TOKENS for each in cast(Sequence[Any], value))


def _of_azure(place: int, row: Mapping[str, Any]) -> Entry:
    tokens = _count(row.get("CONTEXTTOKENS"), "ContextTokens")
    return Entry(place, "Azure trace", tokens=tokens, time=_moment(row.get("TIMESTAMP")))


def _count(value: Any, name: str) -> int:
    """A number of tokens."""
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    if not 0 < count <= MOST_TOKENS:
        raise DatasetError(f"its {name} is no number of tokens: give one from 1 on")
    return count


def _tenant(record: Mapping[str, Any]) -> str:
    metadata = record.get("metadata")
    places = (record, cast(dict[str, Any], metadata) if isinstance(metadata, dict) else {})
    name, value = next(((name, each[name]) for name in TENANT for each in places if each.get(name)), ("", ""))
    return f"key {hashlib.sha256(str(value).encode()).hexdigest()[:8]}" if name == "api_key" else str(value)


def _time(record: Mapping[str, Any]) -> float | None:
    moments = (_moment(record.get(name)) for name in TIME)
    return next((moment for moment in moments if moment is not None), None)


def _moment(value: Any, unit: float = 1) -> float | None:
    """Seconds since 1970 of a time: a number of `unit` parts of a second, or where that is too late of ms, us or ns, or a text in ISO 8601,
    UTC unless it says otherwise. None for anything else."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except ValueError:
        seconds = _seconds(str(value))
        return seconds if 0 <= seconds < LATEST else None
    except (TypeError, OverflowError):
        return None
    if not 0 <= number < LATEST * 1e9:  # not a number, too
        return None
    return number / next(part for part in (unit, 1, 1e3, 1e6, 1e9) if part >= unit and number / part < LATEST)


def _seconds(text: str) -> float:
    """Of a time in ISO 8601; not a number for another text. Digits behind microseconds do not count."""
    text = re.sub(r"(\.\d{6})\d+", r"\1", text.strip().removesuffix(" UTC"))
    try:
        time = datetime.datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        return math.nan


def _vllm_time(line: str) -> float | None:
    """vLLM's log has no year: 2000 has every day."""
    if (found := _VLLM_TIME.search(line)) is None:
        return None
    month, day, hour, minute, second = found.groups()
    return _moment(f"2000-{month}-{day}T{hour}:{minute}:{second}")

"""One entry for each request of a log, whatever the format of its line.

It has the text, whose it is, when it was, and what of it is not counted.
"""

import ast
import datetime
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from dejakv.datasets.base import Sample
from dejakv.datasets.messages import SEEN, read_request, uncounted_fields, unnested
from dejakv.datasets.parts import parse_json_text, text_of
from dejakv.errors import DatasetError

Format = Literal[
    "JSON lines",
    "vLLM's log",
    "OpenAI batch",
    "Langfuse export",
    "LiteLLM log",
    "Mooncake trace",
    "Azure trace",
]

MOONCAKE_BLOCK = 512
"""Tokens of a block of a Mooncake trace."""

LIMITS: Mapping[Format, str] = {
    "Langfuse export": "prompts are in an export of Langfuse only of generations that it stored",
    "vLLM's log": (
        "prompts are in vLLM's log at level DEBUG alone (--enable-log-requests), cut at"
        " --max-log-len if that is given"
    ),
    "LiteLLM log": (
        "prompts are in LiteLLM's log where it stores them (store_prompts_in_spend_logs)"
    ),
    "Mooncake trace": (
        "a Mooncake trace has prefix blocks alone: what stands elsewhere in earlier prompts, and"
        " what blend would save, is unknown"
    ),
    "Azure trace": "an Azure trace has times and lengths alone: what was asked before is unknown",
}
"""For each log format, one sentence for the user on the information that it lacks."""
TRACES = {"Mooncake trace", "Azure trace"}

TENANT = (
    "partition",
    "tenant",
    "end_user",
    "user_api_key_hash",
    "api_key",
    "userId",
    "user_id",
    "user",
)
TIME = (
    "timestamp",
    "startTime",
    "start_time",
    "created_at",
    "createdAt",
    "time",
    "ts",
    "@timestamp",
)
LATEST = 1e11
"""Seconds since 1970 below which a number is a time in seconds.

Up to a thousand times as much it is one in ms, and so on.
"""
MAX_TOKENS = 10**9
"""Largest number that is taken for a prompt's length in tokens, and limit of token ids."""
_VLLM = re.compile(
    r"Request (\S+) details: prompt: (.*), prompt_token_ids: (\[[\d, ]*\]|None), prompt_embeds"
)
_OLD_VLLM = re.compile(
    r"Received request (\S+): prompt: (.*), (?:sampling_)?params: \w+\(.*, prompt_token_ids:"
    r" (\[[\d, ]*\]|None)"
)
_VLLM_BODY = re.compile(r"Request \S+ JSON body: (\{.*)$")
_VLLM_TIME = re.compile(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")

_NO_PROMPT = re.compile(
    r"a?(embedding|rerank|moderation|transcription|speech|image_generation|image_edit)s?",
    re.IGNORECASE,
)
_NO_PROMPT_URL = re.compile(
    r"/v\d+/(embeddings|rerank|moderations|audio|images|score|pooling|classify|tokenize)\b"
)
_REDACTED = "redacted-by-litellm"
_LISTS = ("data", "observations", "items", "requests", "rows", "results", "logs")
_OBSERVATIONS = (
    "GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR",
    "EMBEDDING", "GUARDRAIL",
)  # fmt: skip


class Skipped(str):
    """Name of what a line is, if it is no request to a model that reads text.

    The first word is a noun that can be counted, as in `span of a trace`.
    """


OTHER = Skipped("line on something else than a request")
SPAN = Skipped("span of a trace")
CACHED = Skipped("request that a cache answered")
FAILED = Skipped("request that failed")
EMBEDDED = Skipped("request for embeddings or the like")


@dataclass(frozen=True)
class Entry:
    """One request of a log; what its format does not have is None or empty.

    Attributes
    ----------
    place : int
        Number of the line in the file, from 1 on.
    format : Format
        Format of the line.
    sample : Sample or None
        Its text, with `token_ids` among the fields where the log has them.
    blocks : tuple[int, ...]
        Of a Mooncake trace, ids of its blocks, each of the whole beginning of the prompt.
    tokens : int
        Length of a prompt without text.
    tenant : str
        Whose request it is.
    time : float or None
        Time of its arrival in seconds: since 1970, or since the beginning of a trace. The year of a
        vLLM log, which has none, is 2000.
    left_out : tuple[str, ...]
        Names of what the model may have read and the sample lacks.
    """

    place: int
    format: Format
    sample: Sample | None = None
    blocks: tuple[int, ...] = ()
    tokens: int = 0
    tenant: str = ""
    time: float | None = None
    left_out: tuple[str, ...] = ()


def load_json(text: str) -> Any:
    """Parse JSON; halves of surrogate pairs, which are no text, become question marks."""
    value = json.loads(text)
    # No encoder takes them. Few lines have any, and only those are parsed twice.
    return (
        json.loads(_whole_text(json.dumps(value, ensure_ascii=False)))
        if "\\ud" in text.lower()
        else value
    )


def _whole_text(text: str) -> str:
    return text.encode(errors="replace").decode()


def of_line(place: int, line: str) -> Entry | Skipped:
    """Read a line of a log as an entry, or tell what it is instead.

    Raises
    ------
    DatasetError
        For a line that cannot be read, with the remedy. Values of a wrong shape raise what Python
        raises, and the caller reports the line.
    """
    # Byte order marks, NULs of a file cut under its writer, record separators (RFC 7464).
    text = line.strip("\ufeff \t\r\n\0\x1e")
    if text.startswith("{"):
        return of_record(place, load_json(text))
    if log_match := _VLLM.search(text) or _OLD_VLLM.search(text):
        # vLLM logs Python literals; this evaluates them and runs nothing.
        prompt, ids = ast.literal_eval(log_match[2]), ast.literal_eval(log_match[3])
        sample = _raw(log_match[1], _whole_text(str(prompt or "")), ids)
        return Entry(place, "vLLM's log", sample, time=_vllm_time(text))

    # vLLM may log the body of a request, before a prompt is made of it.
    if log_match := _VLLM_BODY.search(text):
        body, left_out = load_json(log_match[1]), list[str]()
        if why := _no_prompt({"body": body}):
            return why
        return Entry(
            place,
            "vLLM's log",
            _of_body(str(place), body, left_out),
            time=_vllm_time(text),
            left_out=tuple(left_out),
        )

    # vLLM writes much else into the same file, which is no mistake of the log.
    if _VLLM_TIME.search(text):
        return OTHER
    raise DatasetError("it is neither JSON nor a line of vLLM's log: write one JSON object a line")


def of_record(place: int, record: Any) -> Entry | Skipped:
    """Read a JSON object of a log as an entry, or tell what it is instead.

    Raises
    ------
    DatasetError
        For an object that is no request, with the remedy.
    """
    if not isinstance(record, dict):
        raise DatasetError("it is not an object: write each request as one")
    record = cast(dict[str, Any], record)
    if "hash_ids" in record:
        time = _moment(record.get("timestamp"), 1000)
        tokens = _count(record.get("input_length"), "input_length")
        return Entry(
            place,
            "Mooncake trace",
            blocks=tuple(map(int, record["hash_ids"])),
            tokens=tokens,
            time=time,
        )

    if why := _no_prompt(record):
        return why

    name, kind = (
        str(record.get("id", record.get("request_id", place))),
        str(record.get("type", "")).upper(),
    )
    left_out: list[str] = []

    # The forms are told by their fields, the surest first: no log names its writer.
    if isinstance(body := parse_json_text(record.get("body")), dict):
        name, form = str(record.get("custom_id", name)), "OpenAI batch"
        sample = _of_body(name, body, left_out)
    # Before LiteLLM's test, which a start time would pass too.
    elif "input" in record and (
        {"traceId", "trace_id", "startTime", "start_time"} & set(record) or kind in _OBSERVATIONS
    ):
        if kind not in ("", "GENERATION"):
            return SPAN
        form, sample = "Langfuse export", _of_input(name, record["input"], left_out)
    elif "call_type" in record or (
        "startTime" in record and {"messages", "proxy_server_request"} & set(record)
    ):
        form, sample = "LiteLLM log", _of_litellm(name, record, left_out)
    else:
        form, sample = "JSON lines", _plain(str(record.get("id", place)), record, left_out)

    return Entry(
        place, form, sample, tenant=_tenant(record), time=_time(record), left_out=tuple(left_out)
    )


def _no_prompt(record: Mapping[str, Any]) -> Skipped | None:
    """Tell what a record is if no model read a prompt for it."""
    body, response = (cast(Any, parse_json_text(record.get(name))) for name in ("body", "response"))
    body = body if isinstance(body, dict) else {}
    code = response.get("status_code") if isinstance(response, dict) else record.get("status_code")
    names = [str(record.get(name) or "") for name in ("call_type", "type", "operation", "object")]
    urls = [str(record.get(name) or "") for name in ("url", "endpoint", "path")]

    if any(map(_NO_PROMPT.fullmatch, names)) or any(map(_NO_PROMPT_URL.search, urls)):
        return EMBEDDED

    # The model's name alone is a weak sign, and a conversation outweighs it.
    if "messages" not in body and (
        "encoding_format" in body or "embed" in str(body.get("model", "")).lower()
    ):
        return EMBEDDED
    if str(record.get("cache_hit")).lower() in ("true", "1"):
        return CACHED

    # Gateways have no common field for this, so that each one's is looked at.
    failed = (
        str(record.get("status")).lower() in ("failure", "failed", "error")
        or str(record.get("level")).upper() == "ERROR"
    )
    failed = failed or any(record.get(name) for name in ("error", "error_str", "exception"))
    return FAILED if failed or (isinstance(code, int) and code >= 400) else None


def _plain(name: str, record: dict[str, Any], left_out: list[str]) -> Sample:
    """Read a line in a form of our own, with `image` or `images`.

    Such are `{"prompt": ...}`, `{"question": ..., "context": ...}`, `{"messages": [...]}` and their
    kind.
    """
    answer = record.get("answer")
    answer = None if answer is None else str(answer)
    question = record.get("question", record.get("prompt"))
    if question is not None and not any(record.get(key) for key in SEEN):
        if not isinstance(question, str) or not question.strip():
            raise DatasetError(
                "its 'prompt' or 'question' is no text, or an empty one: give a text, or 'messages'"
            )
        omitted_names: set[str] = set(uncounted_fields(record))
        context = text_of(record.get("context"), omitted_names)
        left_out += sorted(omitted_names)
        return Sample(name, question, answer, context=context, fields=record)

    if unnested(record) is record and not any(
        record.get(key) for key in (*SEEN, "message", "query")
    ):
        _refuse_answers(record)
    return _of_messages(name, record, left_out, answer)


def _refuse_answers(record: Mapping[str, Any]) -> None:
    """Raise a DatasetError with the remedy for records that are often taken for requests."""
    if "custom_id" in record:
        raise DatasetError(
            "it is the output of a batch: give the batch's input, which has the prompts"
        )
    if "choices" in record or record.get("object") in (
        "response",
        "chat.completion",
        "text_completion",
    ):
        raise DatasetError("it is an answer without its prompt: log the bodies of requests")
    if key := next((key for key in _LISTS if isinstance(record.get(key), list)), None):
        raise DatasetError(f"its requests are in a list: write one a line (jq -c '.{key}[]' FILE)")


def _of_litellm(name: str, record: Mapping[str, Any], left_out: list[str]) -> Sample:
    """Read the request as the proxy got it, or the messages and parameters that it made of it."""
    body = parse_json_text(record.get("proxy_server_request"))
    if not isinstance(body, dict) or not any(
        unnested(body).get(key) for key in ("messages", "prompt", "input", "contents")
    ):
        # The proxy may log what it sent and not what it got.
        body = parse_json_text(record.get("messages")) or ""
        if isinstance(body, list):
            parameter_sets = (
                parse_json_text(record.get(key)) for key in ("optional_params", "model_parameters")
            )
            extra = {
                key: value
                for each in parameter_sets
                if isinstance(each, dict)
                for key, value in each.items()
                if key in SEEN
            }
            body = {**extra, "messages": body}

    body_text = json.dumps(body)
    if "litellm_truncated" in body_text:
        left_out.append("what LiteLLM cut of long texts")
    if _REDACTED in body_text:
        raise DatasetError("its prompt was not stored (turn_off_message_logging)")
    return _of_input(name, body, left_out)


def _of_input(name: str, logged_input: Any, left_out: list[str]) -> Sample:
    """Read what a gateway or a tracer kept of a request.

    It is a request's body, also as JSON text, its messages, or its prompt as a text.
    """
    body = parse_json_text(logged_input)
    if isinstance(body, dict) and (
        unnested(body) is not body or {"prompt", "question", *SEEN} & set(body)
    ):
        return _of_body(name, cast(dict[str, Any], body), left_out)
    items: list[Any] = body if isinstance(body, list) else []
    if items and (
        not isinstance(logged_input, str) or all(isinstance(item, dict) for item in items)
    ):
        return _of_prompt(name, items, left_out, "its prompt was not stored")

    return _of_prompt(name, logged_input, left_out, "its prompt was not stored")


def _of_body(name: str, body: Mapping[str, Any], left_out: list[str]) -> Sample:
    """Read the body of a completion, chat completion or response."""
    body = unnested(body)
    prompt = body.get("prompt", body.get("question"))
    # A response's `input` may be token ids, and is a conversation otherwise.
    if isinstance(body.get("input"), list) and all(
        isinstance(each, int) for each in cast(list[Any], body["input"])
    ):
        prompt = cast(list[int], body["input"])
    elif any(body.get(key) for key in SEEN):
        return _of_messages(name, body, left_out)

    left_out += sorted(uncounted_fields(body))
    return _of_prompt(name, prompt, left_out, "its body has no prompt and no messages")


def _of_prompt(name: str, prompt: Any, left_out: list[str], lacks: str) -> Sample:
    """Read a text, token ids or messages."""
    if (
        isinstance(prompt, list)
        and len(cast(list[Any], prompt)) == 1
        and isinstance(prompt[0], str)
    ):
        prompt = cast(str, prompt[0])
    if isinstance(prompt, str) and prompt.strip():
        return _raw(name, prompt)
    if isinstance(prompt, list) and prompt:
        if any(isinstance(each, int) for each in cast(list[Any], prompt)):
            return _raw(name, "", cast(list[int], prompt))
        return _of_messages(name, {"messages": prompt}, left_out)

    raise DatasetError(lacks)


def _of_messages(
    name: str, record: Mapping[str, Any], left_out: list[str], answer: str | None = None
) -> Sample:
    omitted_names: set[str] = set(uncounted_fields(unnested(record)))
    messages = tuple(
        (message.role, message.text) for message in read_request(record, "it", omitted_names)
    )
    left_out += sorted(omitted_names)
    return Sample(name, messages[-1][1], answer, messages=messages, fields=record)


def _raw(name: str, prompt: str, ids: Sequence[int] | None = None) -> Sample:
    """Return a prompt as the model reads it."""
    if not prompt.strip() and not ids:
        raise DatasetError("its prompt was not stored")
    if ids and not token_ids(ids):
        raise DatasetError(
            "its prompt has numbers that are no token ids: give ids from 0 on, or a text"
        )

    return Sample(
        name,
        (prompt.strip() and prompt) or "token ids",
        fields={"prompt": prompt, "token_ids": tuple(ids or ()), "raw": True},
    )


def token_ids(value: Any) -> bool:
    """Tell whether a value is a list or tuple of integers from 0 to below `MAX_TOKENS`."""
    listed = isinstance(value, list | tuple)
    # Not isinstance: True and False are ints as well.
    return listed and all(
        type(each) is int and 0 <= each < MAX_TOKENS for each in cast(Sequence[Any], value)
    )


def of_azure(place: int, row: Mapping[str, Any]) -> Entry:
    """Read a row of Azure's trace, which has a time and a length in tokens.

    Raises
    ------
    DatasetError
        For a row without a length.
    """
    tokens = _count(row.get("CONTEXTTOKENS"), "ContextTokens")
    return Entry(place, "Azure trace", tokens=tokens, time=_moment(row.get("TIMESTAMP")))


def _count(value: Any, name: str) -> int:
    """Return a number of tokens; a DatasetError names the field that has none."""
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0

    if not 0 < count <= MAX_TOKENS:
        raise DatasetError(f"its {name} is no number of tokens: give one from 1 on")
    return count


def _tenant(record: Mapping[str, Any]) -> str:
    metadata = record.get("metadata")
    places = (record, cast(dict[str, Any], metadata) if isinstance(metadata, dict) else {})
    name, value = next(
        ((name, each[name]) for name in TENANT for each in places if each.get(name)), ("", "")
    )

    # Reports name tenants, and must not have a key in them.
    return (
        f"key {hashlib.sha256(str(value).encode()).hexdigest()[:8]}"
        if name == "api_key"
        else str(value)
    )


def _time(record: Mapping[str, Any]) -> float | None:
    moments = (_moment(record.get(name)) for name in TIME)
    return next((moment for moment in moments if moment is not None), None)


def _moment(value: Any, unit: float = 1) -> float | None:
    """Return the seconds since 1970 of a time; None for anything else.

    Parameters
    ----------
    value : object
        A number of `unit` parts of a second, or where that is too late of ms, us or ns; or a text
        in ISO 8601, UTC unless it says otherwise.
    unit : float
        Parts of a second in 1.
    """
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except ValueError:
        seconds = _seconds(str(value))
        return seconds if 0 <= seconds < LATEST else None
    except (TypeError, OverflowError):
        return None

    # This comparison is false for "not a number", too.
    if not 0 <= number < LATEST * 1e9:
        return None

    # Only this unit or a finer one, so that small times in ms are not taken for seconds.
    return number / next(
        part for part in (unit, 1, 1e3, 1e6, 1e9) if part >= unit and number / part < LATEST
    )


def _seconds(text: str) -> float:
    """Return the seconds of a time in ISO 8601; not a number for another text.

    Digits behind microseconds do not count.
    """
    text = re.sub(r"(\.\d{6})\d+", r"\1", text.strip().removesuffix(" UTC"))
    try:
        time = datetime.datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        return math.nan


def _vllm_time(line: str) -> float | None:
    """Return the time of a line of vLLM's log, which has no year: 2000 has every day."""
    if (time_match := _VLLM_TIME.search(line)) is None:
        return None
    month, day, hour, minute, second = time_match.groups()
    return _moment(f"2000-{month}-{day}T{hour}:{minute}:{second}")

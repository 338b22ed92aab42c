"""Server-sent events in OpenAI's form: a chunk a piece of text, the usage if asked for, `[DONE]`."""

import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dejakv.errors import InputError
from dejakv.pipeline import Answer
from dejakv.server.answers import finish_reason, provenance, usage_of
from dejakv.server.jobs import Job

log = logging.getLogger("dejakv.server")


class EventStream(StreamingResponse):
    """The events of a job. When the stream ends, even before its first event, the job stops."""

    def __init__(self, job: Job, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def sse(
    job: Job, head: dict[str, Any], kind: str, stops: Sequence[str], usage: bool, ends: frozenset[int]
) -> AsyncIterator[str]:
    """Events of a job. A failure after the first byte becomes an error event: the status line has already been sent."""
    chat = kind.startswith("chat")
    name = "chat.completion.chunk" if chat else kind

    def event(text: str | None, reason: str | None = None, **more: Any) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if chat:
            choice["delta"] = {"content": text} if text is not None else {}
        else:
            choice["text"] = text or ""
        return _line({**head, "object": name, "choices": [choice], **more})

    text, shown, stopped = "", 0, False
    if chat:
        first = {"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": ""}}
        yield _line({**head, "object": name, "choices": [first]})
    try:
        async for piece in job.stream():
            if isinstance(piece, Answer):
                final, stopped = cut(piece.text, stops)
                if len(final) > shown:
                    yield event(final[shown:])
                yield event(None, finish_reason(piece, stopped, ends), dejakv=provenance(piece))
                if usage:
                    yield _line({**head, "object": name, "choices": [], "usage": usage_of(piece)})
                continue
            text, stopped = cut(text + piece, stops) if not stopped else (text, True)
            until = len(text) if stopped else safe_length(text, stops)
            if until > shown:
                yield event(text[shown:until])
                shown = until
    except InputError as error:
        yield _line({"error": {"message": str(error), "type": "invalid_request_error"}})
    except Exception:
        log.exception("a streamed request failed")
        yield _line({"error": {"message": "the server cannot serve this request at present", "type": "server_error"}})
    yield "data: [DONE]\n\n"


def _line(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop sequence in it, and whether there was one. Empty sequences are ignored."""
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def safe_length(text: str, stops: Sequence[str]) -> int:
    """Length of a growing text that can be sent: a possible beginning of a stop sequence is held back."""
    held = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                held = max(held, length)
                break
    return len(text) - held

"""Labels of approximate answers that vLLM's OpenAI server does not show.

A label is a header, and a last event of a stream. vLLM puts what a KV connector says of a request
into the bodies of unstreamed answers; of several prompts or samples, it puts what is said of one.
This module notes it for all requests of one HTTP call, where the server's engine client hands out
their results.
"""

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from dejakv.http.errors import Send

HEADER = b"x-dejakv-approximate"
STREAMS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Paths whose streams show the label.

It is an event of ours before `[DONE]`, or, of responses, a field of vLLM's `response.completed`.
"""

_DONE = b"data: [DONE]"
_notes: ContextVar["AnswerNotes | None"] = ContextVar("dejakv_labels", default=None)


class AnswerNotes:
    """Reports of the connector on the requests of one HTTP call."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def note(self, output: Any) -> None:
        """Note the connector's report in a result (`kv_transfer_params.dejakv`), if it has one."""
        params = getattr(output, "kv_transfer_params", None)
        if isinstance(params, dict) and isinstance(params.get("dejakv"), dict):
            self.reports.append(params["dejakv"])

    @property
    def approximate(self) -> bool:
        """Whether any part of the answer is approximate."""
        return any(report.get("approximate") for report in self.reports)

    def label(self) -> dict[str, Any]:
        """Return the report for the whole call: an approximate request's, if there is one."""
        return next(
            (report for report in self.reports if report.get("approximate")), self.reports[0]
        )


def note_results(client: Any) -> bool:
    """Note the reports in the results of an engine client, from now on.

    Its `generate` is replaced, once, by a function that passes the results on.

    Returns
    -------
    bool
        False for a client that hands out no results.
    """
    generate = getattr(client, "generate", None)
    if generate is None:
        return False
    # Wrapped once for a client: each request comes by here.
    if not hasattr(generate, "dejakv"):

        def noting(*args: Any, **arguments: Any) -> AsyncIterator[Any]:
            return _noted(generate(*args, **arguments), _notes.get())

        noting.dejakv = True  # pyright: ignore[reportFunctionMemberAccess]
        client.generate = noting

    return True


async def _noted(results: Any, notes: AnswerNotes | None) -> AsyncIterator[Any]:
    """Pass results on, and close the engine's iterator at the end.

    A caller that leaves closes it, too, which aborts the request.
    """
    try:
        async for output in results:
            if notes is not None:
                notes.note(output)
            yield output
    finally:
        await results.aclose()


def label_answers(send: Send, asks: bool) -> Send:
    """Wrap `send` for one HTTP call, whose requests' results are noted in this context.

    Parameters
    ----------
    send : Send
        The server's function.
    asks : bool
        Whether the client asked for the connector's report, so that a stream carries it also for an
        exact answer.
    """
    notes, first = AnswerNotes(), bytearray()
    # The engine's client runs in this context, and so finds this call's notes.
    _notes.set(notes)

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start" and notes.reports:
            value = b"true" if notes.approximate else b"false"
            message = {**message, "headers": [*message.get("headers", []), (HEADER, value)]}
        elif message["type"] == "http.response.body" and message.get("body"):
            body = bytes(message["body"])
            # The first event has the id and model that the last one repeats.
            if not first:
                first.extend(body)
            if _DONE in body and notes.reports and (asks or notes.approximate):
                message = {
                    **message,
                    "body": body.replace(_DONE, _event(bytes(first), notes) + _DONE),
                }

        await send(message)

    return sent


def _event(first: bytes, notes: AnswerNotes) -> bytes:
    """Make the event before the end of a stream: a chunk with the label and without choices."""
    chunk: dict[str, Any] = {}
    with suppress(ValueError):
        chunk = json.loads(first.split(b"\n", 1)[0].removeprefix(b"data: "))
    about = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
    label = {**about, "choices": [], "kv_transfer_params": {"dejakv": notes.label()}}
    return b"data: " + json.dumps(label).encode() + b"\n\n"

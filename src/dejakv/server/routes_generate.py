"""`POST /v1/generate`, with the fields of SemShareKV (arXiv 2509.24832), and OpenAI's endpoints.

`/v1/completions`, `/v1/chat/completions` and `/v1/models` take the requests of OpenAI's clients.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dejakv.decide.plan import is_approximate
from dejakv.errors import InputError
from dejakv.http.asgi import UNBUFFERED
from dejakv.http.errors import RefusedError, error_object
from dejakv.pipeline import Answer
from dejakv.request import Media, Request, Sampling
from dejakv.server.access import JsonRoute, NoStore, Partition
from dejakv.server.chat_prompt import conversation, pictures_of, render
from dejakv.server.jobs import ServerJob
from dejakv.server.logprobs import logprobs_object
from dejakv.server.problems import ELSEWHERE, refusal_of
from dejakv.server.schemas import (
    AnswerProvenance,
    AnswerTimings,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerateResponse,
    OpenAIRequest,
    StateOrigin,
)
from dejakv.server.service import AnyService, GenerateService

generate_router = APIRouter(tags=["generate"], route_class=JsonRoute)
openai_router = APIRouter(tags=["openai"], route_class=JsonRoute)


@generate_router.post("/v1/generate")
async def generate(
    http: HttpRequest,
    service: AnyService,
    partition: Partition,
    no_store: NoStore,
    body: GenerateRequest,
) -> GenerateResponse:
    """Answer a prompt.

    The KV of a similar earlier prompt is used if the request or the server's `--reuse` asks for it.
    """
    request = Request(
        uuid.uuid4().hex,
        body.prompt,
        body.prompt,
        partition=partition,
        sampling=Sampling(body.max_new_tokens, body.temperature, body.top_p, body.seed),
        reuse=service.reuse_of(body.use_semshare),
        threshold=body.sim_threshold,
        no_store=no_store or body.no_store,
        ttl=body.ttl,
    )

    answer = await service.answer(http, request)
    record = answer.record
    # Before it may get another name.
    ref_key = service.entry_name(partition, record.donor) if record.donor else None
    store_key = None
    # No new name then, but the entry that was there has one.
    if record.method == "exact" and request.no_store:
        store_key = service.entry_name(partition, record.key)
    elif record.stored or record.method == "exact":
        store_key = service.name_entry(partition, record.key, body.store_key)

    return GenerateResponse(
        **vars(StateOrigin.model_validate(record)),
        text=answer.text,
        used_semshare=is_approximate(record.method),
        cache_hit=record.method != "none",
        ref_key=ref_key,
        retrieved_sim=record.score,
        store_key=store_key,
        timings=AnswerTimings.model_validate(record, from_attributes=True),
    )


@openai_router.get("/v1/models")
async def models(service: AnyService, _: Partition) -> dict[str, Any]:
    """List the model of this server."""
    return {"object": "list", "data": [_model(service)]}


@openai_router.get("/v1/models/{name:path}")
async def model(name: str, service: AnyService, _: Partition) -> dict[str, Any]:
    """Return the model of this server by its name."""
    _check_model(name, service)
    return _model(service)


def _model(service: GenerateService) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "dejakv",
    }


@openai_router.post("/v1/completions")
async def completions(
    http: HttpRequest,
    service: AnyService,
    partition: Partition,
    no_store: NoStore,
    body: CompletionRequest,
) -> Any:
    """Answer OpenAI's completions, one prompt a request."""
    _check_model(body.model, service)
    request = _request(body, partition, no_store, body.prompt, body.prompt, body.max_tokens or 16)
    return await _serve(body, http, service, request)


@openai_router.post("/v1/chat/completions")
async def chat_completions(
    http: HttpRequest,
    service: AnyService,
    partition: Partition,
    no_store: NoStore,
    body: ChatRequest,
) -> Any:
    """Answer OpenAI's chat completions, with pictures as data URLs."""
    _check_model(body.model, service)
    chat = conversation(body.messages)
    service.check_length(sum(map(len, chat.texts)))
    media = await pictures_of(http, chat.pictures, service.settings)
    prompt, chunk = await run_in_threadpool(render, chat, service.templates)

    tokens = body.max_completion_tokens or body.max_tokens or 256
    return await _serve(
        body, http, service, _request(body, partition, no_store, prompt, chunk, tokens, media)
    )


def _check_model(name: str | None, service: GenerateService) -> None:
    """Refuse (404) a request for another model."""
    if name not in (None, service.model_name):
        raise RefusedError(
            404,
                f"this server has the model {service.model_name!r}, not {str(name)[:80]!r}: name "
                "that one, or none",
            param="model", code="model_not_found",
        )  # fmt: skip


def _request(
    body: OpenAIRequest,
    partition: str,
    no_store: bool,
    prompt: str,
    chunk: str,
    tokens: int,
    media: tuple[Media, ...] = (),
) -> Request:
    options = body.dejakv
    return Request(
        uuid.uuid4().hex,
        prompt,
        chunk,
        media,
        partition,
        Sampling(tokens, body.temperature, body.top_p, body.seed, stop=tuple(body.stop)),
        # Clients that do not know DejaKV get exact answers only.
        reuse=options.reuse or "exact",
        threshold=options.threshold,
        parts=tuple(options.parts),
        order=options.order,
        no_store=no_store or options.no_store,
        no_cache=options.no_cache,
        ttl=options.ttl,
    )


async def _serve(
    body: CompletionRequest | ChatRequest,
    http: HttpRequest,
    service: GenerateService,
    request: Request,
) -> Any:
    reply = OpenAIReply(service, request.id, isinstance(body, ChatRequest), body.stop)
    top_tokens = body.top_tokens
    if body.stream:
        for field, asked in (("n", body.n > 1), ("logprobs", top_tokens is not None)):
            if asked:
                raise InputError(
                    f"a stream has one choice here, without logprobs: leave out stream or {field},"
                    f" or use {ELSEWHERE}"
                )

        # Before the status line: a full queue must still answer 429.
        job = service.submit(request)
        return EventStream(job, reply.events(job, body.stream_options.include_usage))

    choices: list[dict[str, Any]] = []
    answers: list[Answer] = []
    for number in range(body.n):
        answer = await service.answer(http, _numbered(request, number), top_tokens)
        text, stopped = cut_at_stop(answer.text, body.stop)
        places = answer.completion.details.get("logprobs")
        logprobs = None if places is None else logprobs_object(places, reply.chat, len(text))
        content = (
            {"message": {"role": "assistant", "content": text}} if reply.chat else {"text": text}
        )
        reason = reply.finish_reason(answer, stopped)
        choices.append({"index": number, "finish_reason": reason, "logprobs": logprobs, **content})
        answers.append(answer)

    return {**reply.object(*choices), "usage": _usage(*answers), "dejakv": _provenance(answers[0])}


def _numbered(request: Request, number: int) -> Request:
    """Return the request of one choice: each choice samples with a seed of its own."""
    seed = request.sampling.seed
    if not number or seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + number) % 2**63))


class EventStream(StreamingResponse):
    """Response of a job's events. When it ends, even before its first event, the job stops."""

    def __init__(self, job: ServerJob, events: AsyncIterator[str]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", **UNBUFFERED},
        )
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and stop the job afterwards."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


class OpenAIReply:
    """OpenAI's objects of one response, whole or in events.

    Parameters
    ----------
    service : GenerateService
        Service that answers.
    id : str
        Id of the request.
    chat : bool
        Whether the response is a chat completion.
    stops : Sequence[str]
        Stop sequences of the request.
    """

    def __init__(self, service: GenerateService, id: str, chat: bool, stops: Sequence[str]) -> None:
        self.chat = chat
        self._stops, self._ends = stops, service.ends
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{id}",
            "object": kind,
            "created": int(time.time()),
            "model": service.model_name,
        }

    def object(self, *choices: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        """Make OpenAI's object with these choices."""
        choice_objects = [
            {"index": 0, "finish_reason": reason, "logprobs": None, **choice} for choice in choices
        ]
        return {**self._head, "choices": choice_objects}

    async def events(self, job: ServerJob, usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events of a job.

        There is one chunk for a piece of text, the usage if asked for, and `[DONE]`. A failure
        becomes an error event, since the status line has already been sent.
        """
        text, shown, stopped = "", 0, False
        if self.chat:
            yield self._chunk({"role": "assistant", "content": ""})

        try:
            async for piece in job.stream():
                if isinstance(piece, Answer):
                    final, stopped = cut_at_stop(piece.text, self._stops)
                    # Held back as the beginning of a stop sequence, and it was none.
                    if len(final) > shown:
                        yield self._chunk({"content": final[shown:]})
                    reason = self.finish_reason(piece, stopped)
                    yield self._chunk({}, reason, dejakv=_provenance(piece))
                    if usage:
                        yield self._chunk(None, usage=_usage(piece))
                    continue

                text, stopped = (
                    cut_at_stop(text + piece, self._stops) if not stopped else (text, True)
                )
                until = len(text) if stopped else safe_length(text, self._stops)
                if until > shown:
                    yield self._chunk({"content": text[shown:until]})
                    shown = until
        except Exception as error:
            refusal = refusal_of(error)
            yield _line(error_object(refusal.status, str(refusal)))

        yield "data: [DONE]\n\n"

    def finish_reason(self, answer: Answer, stopped: bool) -> str:
        """Return `stop` for a stop sequence or an end token, and `length` for any other end."""
        ended = bool(answer.token_ids) and answer.token_ids[-1] in self._ends
        return "stop" if stopped or ended else "length"

    def _chunk(self, delta: dict[str, str] | None, reason: str | None = None, **more: Any) -> str:
        """Make an event with a piece of the answer; None makes one without a choice."""
        choices = (
            []
            if delta is None
            else [{"delta": delta} if self.chat else {"text": delta.get("content", "")}]
        )
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return _line({**self.object(*choices, reason=reason), "object": kind, **more})


def _line(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop sequence in it, and whether there was one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def safe_length(text: str, stops: Sequence[str]) -> int:
    """Return how many characters of a growing text can be sent.

    An end that may begin a stop sequence is held back.
    """
    begun = [
        length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])
    ]
    return len(text) - max(begun, default=0)


def _usage(*answers: Answer) -> dict[str, Any]:
    """Return OpenAI's usage of all choices.

    `cached_tokens` are the prompt tokens that were not computed for the first choice.
    """
    record, written = answers[0].record, sum(answer.record.output_tokens for answer in answers)
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": record.prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": record.reused_tokens},
    }


def _provenance(answer: Answer) -> dict[str, Any]:
    """Return the origin of the answer's state."""
    return vars(AnswerProvenance.model_validate(answer.record))

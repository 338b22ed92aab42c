"""`/v1/completions` and `/v1/chat/completions` as OpenAI's clients expect them, and `/v1/models`."""

import time
from typing import Any

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from dejakv.errors import InputError
from dejakv.request import Media, Request, Sampling
from dejakv.server.access import no_store_of, partition_of, service_of
from dejakv.server.answers import finish_reason, provenance, usage_of
from dejakv.server.bodies import body_of, takes
from dejakv.server.chat import conversation, render
from dejakv.server.pictures import pictures_of
from dejakv.server.refusals import RefusedError
from dejakv.server.schemas import ChatRequest, CompletionRequest, OpenAIRequest
from dejakv.server.service import Service
from dejakv.server.stops import cut
from dejakv.server.stream import EventStream, sse

router = APIRouter(tags=["openai"])


@router.get("/v1/models")
async def models(service: Service = Depends(service_of), _: str = Depends(partition_of)) -> dict[str, Any]:
    """The model of this server."""
    entry = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "dejakv"}
    return {"object": "list", "data": [entry]}


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
async def completions(
    http: HttpRequest,
    body: CompletionRequest = Depends(body_of(CompletionRequest)),
    service: Service = Depends(service_of),
    partition: str = Depends(partition_of),
    no_store: bool = Depends(no_store_of),
) -> Any:
    """OpenAI's completions, one prompt a request."""
    prompt = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    request = _request(body, service, partition, prompt, prompt, (), body.max_tokens or 16, no_store)
    return await _serve(body, http, service, request, "text_completion")


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
async def chat_completions(
    http: HttpRequest,
    body: ChatRequest = Depends(body_of(ChatRequest)),
    service: Service = Depends(service_of),
    partition: str = Depends(partition_of),
    no_store: bool = Depends(no_store_of),
) -> Any:
    """OpenAI's chat completions; pictures as data URLs."""
    asked = conversation(body.messages)
    service.check_length(sum(map(len, asked.texts)))
    media = await pictures_of(http, asked.pictures, service.settings)
    prompt, chunk = await run_in_threadpool(render, asked, service.templates)
    tokens = body.max_completion_tokens or body.max_tokens or 256
    request = _request(body, service, partition, prompt, chunk, media, tokens, no_store)
    return await _serve(body, http, service, request, "chat.completion")


def _request(
    body: OpenAIRequest,
    service: Service,
    partition: str,
    prompt: str,
    chunk: str,
    media: tuple[Media, ...],
    tokens: int,
    no_store: bool,
) -> Request:
    if body.model not in (None, service.model_name):
        raise RefusedError(
            404, f"this server has the model {service.model_name!r}, not {body.model[:80]!r}: name that one, or none"
        )
    if body.tools:
        raise InputError("tools are not supported: send the request without them")
    sampling = Sampling(tokens, body.temperature, body.top_p, body.seed)
    reuse = body.dejakv.reuse or "exact"  # clients that do not know DejaKV get exact answers only
    asked = body.dejakv
    return service.request(
        prompt, chunk, partition, sampling, media, reuse, asked.threshold, tuple(asked.parts), asked.order,
        no_store=no_store or asked.no_store, ttl=asked.ttl,
    )  # fmt: skip


async def _serve(body: OpenAIRequest, http: HttpRequest, service: Service, request: Request, kind: str) -> Any:
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    head = {"id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{request.id}", "created": int(time.time())}
    head |= {"model": service.model_name}
    if body.stream:
        job = service.worker.submit(request)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(job, sse(job, head, kind, stops, usage, service.ends))
    answer = await service.answer(http, request)
    text, stopped = cut(answer.text, stops)
    reason = finish_reason(answer, stopped, service.ends)
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if kind.startswith("chat") else {"text": text}
    return {**head, "object": kind, "choices": [choice], "usage": usage_of(answer), "dejakv": provenance(answer)}

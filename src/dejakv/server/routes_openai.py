"""`/v1/completions` and `/v1/chat/completions` as OpenAI's clients expect them, and `/v1/models`."""

import time
from typing import Any

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from dejakv.http.errors import RefusedError
from dejakv.request import Media, Request, Sampling
from dejakv.server.access import no_store_of, partition_of, service_of
from dejakv.server.answers import finish_reason, provenance, usage_of
from dejakv.server.bodies import body_of, takes
from dejakv.server.chat import conversation, render
from dejakv.server.pictures import pictures_of
from dejakv.server.schemas import NEUTRAL, ChatRequest, CompletionRequest, OpenAIRequest
from dejakv.server.service import Service
from dejakv.server.stream import EventStream, cut, sse

router = APIRouter(tags=["openai"])


@router.get("/v1/models")
async def models(service: Service = Depends(service_of), _: str = Depends(partition_of)) -> dict[str, Any]:
    """The model of this server."""
    return {"object": "list", "data": [_model(service)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Service = Depends(service_of), _: str = Depends(partition_of)) -> dict[str, Any]:
    """The model of this server by its name."""
    _check_model(name, service)
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.model_name, "object": "model", "created": 0, "owned_by": "dejakv"}


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
async def completions(
    http: HttpRequest,
    body: CompletionRequest = Depends(body_of(CompletionRequest, invalid=400)),
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
    body: ChatRequest = Depends(body_of(ChatRequest, invalid=400)),
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


def _check_model(name: str, service: Service) -> None:
    if name != service.model_name:
        raise RefusedError(
            404, f"this server has the model {service.model_name!r}, not {name[:80]!r}: name that one, or none",
            param="model", code="model_not_found",
        )  # fmt: skip


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
    _check_model(body.model or service.model_name, service)
    if (refused := body.refused()) is not None:
        name, why = refused
        code = "unsupported_parameter" if name in NEUTRAL else "unknown_parameter"
        raise RefusedError(400, why, param=name[:80], code=code)
    sampling = Sampling(tokens, body.temperature, body.top_p, body.seed, stop=tuple(body.stop))
    reuse = body.dejakv.reuse or "exact"  # clients that do not know DejaKV get exact answers only
    asked = body.dejakv
    return service.request(
        prompt, chunk, partition, sampling, media, reuse, asked.threshold, tuple(asked.parts), asked.order,
        no_store=no_store or asked.no_store, ttl=asked.ttl,
    )  # fmt: skip


async def _serve(body: OpenAIRequest, http: HttpRequest, service: Service, request: Request, kind: str) -> Any:
    head = {"id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{request.id}", "created": int(time.time())}
    head |= {"model": service.model_name}
    if body.stream:
        job = service.worker.submit(request)
        usage = body.stream_options.include_usage
        return EventStream(job, sse(job, head, kind, body.stop, usage, service.ends))
    answer = await service.answer(http, request)
    text, stopped = cut(answer.text, body.stop)
    reason = finish_reason(answer, stopped, service.ends)
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if kind.startswith("chat") else {"text": text}
    return {**head, "object": kind, "choices": [choice], "usage": usage_of(answer), "dejakv": provenance(answer)}

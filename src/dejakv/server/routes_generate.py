"""`POST /v1/generate`: SemShareKV's own endpoint."""

import uuid

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from dejakv.decide.plan import APPROXIMATE
from dejakv.request import Request, Sampling
from dejakv.server.access import JsonRoute, NoStore, Partition
from dejakv.server.schemas import GenerateRequest, GenerateResponse, Origin, Timings
from dejakv.server.service import AnyService

router = APIRouter(tags=["generate"], route_class=JsonRoute)


@router.post("/v1/generate")
async def generate(
    http: HttpRequest, service: AnyService, partition: Partition, no_store: NoStore, body: GenerateRequest
) -> GenerateResponse:
    """Answers a prompt; with the KV of a similar earlier prompt if the request or the server's `--reuse` asks for it."""
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
    ref_key = service.entry_name(partition, record.donor) if record.donor else None  # before it may get another name
    store_key = None
    if record.method == "exact" and request.no_store:
        store_key = service.entry_name(partition, record.key)
    elif record.stored or record.method == "exact":
        store_key = service.name_entry(partition, record.key, body.store_key)
    return GenerateResponse(
        **vars(Origin.model_validate(record)),
        text=answer.text,
        used_semshare=record.method in APPROXIMATE,
        cache_hit=record.method != "none",
        ref_key=ref_key,
        retrieved_sim=record.score,
        store_key=store_key,
        timings=Timings.model_validate(record, from_attributes=True),
    )

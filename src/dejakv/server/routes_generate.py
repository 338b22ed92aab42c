"""`POST /v1/generate`: SemShareKV's own endpoint."""

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest

from dejakv.pipeline import Answer
from dejakv.request import Sampling
from dejakv.server.access import partition_of, service_of
from dejakv.server.bodies import body_of, takes
from dejakv.server.schemas import GenerateRequest, GenerateResponse, Timings
from dejakv.server.service import Service

router = APIRouter(tags=["generate"])


@router.post("/v1/generate", openapi_extra=takes(GenerateRequest))
async def generate(
    http: HttpRequest,
    body: GenerateRequest = Depends(body_of(GenerateRequest)),
    service: Service = Depends(service_of),
    partition: str = Depends(partition_of),
) -> GenerateResponse:
    """Answers a prompt; with the KV of a similar earlier prompt if the request or the server's `--reuse` asks for it."""
    sampling = Sampling(body.max_new_tokens, body.temperature, body.top_p, body.seed)
    reuse = service.reuse_of(body.use_semshare)
    request = service.request(body.prompt, body.prompt, partition, sampling, (), reuse, body.sim_threshold)
    answer = await service.answer(http, request)
    return response(answer, service, partition, body.store_key)


def response(answer: Answer, service: Service, partition: str, wanted: str | None) -> GenerateResponse:
    """The answer with its provenance, in SemShareKV's fields and DejaKV's."""
    record = answer.record
    stored = record.key if record.stored or record.method == "exact" else None
    return GenerateResponse(
        text=answer.text,
        used_semshare=record.method in ("adopt", "blend"),
        cache_hit=record.method != "none",
        ref_key=service.entry_name(partition, record.donor) if record.donor else None,
        retrieved_sim=record.score,
        store_key=service.name_entry(partition, stored, wanted) if stored else None,
        level=record.level,
        reuse=record.method,
        approximate=record.approximate,
        reason=record.reason,
        tokens_reused=record.reused_tokens,
        tokens_computed=record.computed_tokens,
        timings=Timings(
            ttft_ms=record.ttft_ms,
            latency_ms=record.latency_ms,
            lookup_ms=record.lookup_ms,
            inject_ms=record.inject_ms,
        ),
    )

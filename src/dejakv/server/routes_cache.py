"""`/v1/cache/...`: figures of a partition, and clearing it."""

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool

from dejakv.server.access import caller_of, partition_of, service_of
from dejakv.server.gate import Caller
from dejakv.server.schemas import CacheStats, ClearResponse, TrustStats
from dejakv.server.service import Service

router = APIRouter(tags=["cache"])

_OWN = ("visual_cache_hits", "visual_cache_misses", "visual_encoder_runs", "visual_encoder_failures")
"""Figures of the encoder registry that depend only on the tenant's own requests: no sizes, evictions, waits or times."""


@router.get("/v1/cache/stats")
async def stats(service: Service = Depends(service_of), caller: Caller = Depends(caller_of)) -> CacheStats:
    """Hits and misses by level of the caller's own requests; of all requests for the operator."""
    return await run_in_threadpool(_stats, service, caller)


@router.post("/v1/cache/clear")
async def clear(
    service: Service = Depends(service_of),
    caller: Caller = Depends(caller_of),
    partition: str = Depends(partition_of),
) -> ClearResponse:
    """Removes the caller's entries. A running request finishes; its state is stored after the clearing."""
    removed = await run_in_threadpool(_clear, service, partition)
    return ClearResponse(cleared=removed if caller.operator else None)


def _stats(service: Service, caller: Caller) -> CacheStats:
    cache = service.worker.pipeline.cache
    assert cache is not None
    counts, store = cache.stats(caller.partition), cache.store.stats(caller.partition)
    trust = cache.trust(caller.partition)
    registry = getattr(service.worker.pipeline.engine, "encoder_cache", None)
    return CacheStats(
        entries=store.entries if caller.operator else None,
        bytes=store.bytes if caller.operator else None,
        stored=store.puts,
        lookups=counts.lookups,
        prefix_hits=counts.prefix_hits,
        hits=counts.hits,
        misses=counts.misses,
        rejections=counts.rejections,
        promotions=counts.promotions,
        encoder=_encoder(registry.get_cache_stats(caller.partition), caller) if registry is not None else {},
        trust=TrustStats(**{name: getattr(trust, name) for name in TrustStats.model_fields})
        if trust is not None
        else None,
    )


def _clear(service: Service, partition: str) -> int:
    cache = service.worker.pipeline.cache
    assert cache is not None
    service.forget_names(partition)
    registry = getattr(service.worker.pipeline.engine, "encoder_cache", None)
    if registry is not None:
        registry.clear(partition)
    return cache.clear(partition)


def _encoder(figures: dict[str, object], caller: Caller) -> dict[str, float]:
    numbers = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
    return numbers if caller.operator else {name: numbers[name] for name in _OWN}

"""`/v1/cache/...`: a partition's own figures, and emptying it."""

from fastapi import APIRouter, Depends
from starlette.concurrency import run_in_threadpool

from dejakv.server.access import partition_of, service_of
from dejakv.server.schemas import CacheStats, ClearResponse
from dejakv.server.service import Service

router = APIRouter(tags=["cache"])


@router.get("/v1/cache/stats")
async def stats(service: Service = Depends(service_of), partition: str = Depends(partition_of)) -> CacheStats:
    """Entries, bytes, hits and misses by level of the caller's partition."""
    return await run_in_threadpool(_stats, service, partition)


@router.post("/v1/cache/clear")
async def clear(service: Service = Depends(service_of), partition: str = Depends(partition_of)) -> ClearResponse:
    """Removes the caller's entries. A request that runs meanwhile finishes; its state is stored after the clearing."""
    return ClearResponse(cleared=await run_in_threadpool(_clear, service, partition))


def _stats(service: Service, partition: str) -> CacheStats:
    cache = service.worker.pipeline.cache
    assert cache is not None
    counts, store = cache.stats(partition), cache.store.stats(partition)
    registry = getattr(service.worker.pipeline.engine, "encoder_cache", None)
    return CacheStats(
        entries=store.entries,
        bytes=store.bytes,
        lookups=counts.lookups,
        prefix_hits=counts.prefix_hits,
        hits=counts.hits,
        misses=counts.lookups - sum(counts.hits.values()),
        rejections=counts.rejections,
        promotions=counts.promotions,
        encoder=_numbers(registry.get_cache_stats(partition)) if registry is not None else {},
    )


def _clear(service: Service, partition: str) -> int:
    cache = service.worker.pipeline.cache
    assert cache is not None
    service.forget_names(partition)
    registry = getattr(service.worker.pipeline.engine, "encoder_cache", None)
    if registry is not None:
        registry.clear(partition)
    return cache.clear(partition)


def _numbers(figures: dict[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}

"""`/v1/cache/...`: figures of a partition, and the removal of its entries."""

from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from dejakv.errors import InputError
from dejakv.http.errors import RefusedError
from dejakv.http.keys import ApiCaller
from dejakv.server.access import AnyCaller, JsonRoute, Partition
from dejakv.server.schemas import PurgeRequest
from dejakv.server.service import AnyService, GenerateService
from dejakv.store.selection import PurgeResult, Selection

router = APIRouter(tags=["cache"], route_class=JsonRoute)

_OWN = (
    "visual_cache_hits",
    "visual_cache_misses",
    "visual_encoder_runs",
    "visual_encoder_failures",
)
"""Figures of the encoder registry that depend only on the tenant's own requests.

Sizes, evictions, waits and times depend on others, too.
"""

_TRUST = (
    "delta confidence gate rules explored explored_wrong served audited wrong upper lost".split()
)
_PURGED = ("prompts", "rows", "parts", "encoder_outputs", "bytes")


@router.get("/v1/cache/stats")
def stats(service: AnyService, caller: AnyCaller) -> dict[str, Any]:
    """Return figures of the caller's own requests; of all requests for the operator.

    `stored` counts prompts that were stored since the start. Each of the `lookups` is in `hits` (by
    level), in `prefix_hits` or in `misses`. `entries` and `bytes` (the present content) are null
    for one tenant of several, because they may depend on others. `trust` is null without an error
    bound: would-be hits that were `explored` both ways, `served` approximately, `audited` of these,
    and how many were wrong; `upper`: upper end of the share of wrong answers served now.
    """
    cache = service.cache
    counts, store = cache.stats(caller.partition), cache.store.stats(caller.partition)
    trust = cache.trust(caller.partition)
    registry = service.worker.pipeline.engine.encoder_cache
    return {
        "entries": store.entries if caller.operator else None,
        "bytes": store.bytes if caller.operator else None,
        "stored": store.puts,
        "lookups": counts.lookups,
        "prefix_hits": counts.prefix_hits,
        "hits": counts.hits,
        "misses": counts.misses,
        "rejections": counts.rejections,
        "promotions": counts.promotions,
        "encoder": _encoder(registry.get_cache_stats(caller.partition), caller)
        if registry is not None
        else {},
        "trust": {name: getattr(trust, name) for name in _TRUST} if trust is not None else None,
    }


@router.post("/v1/cache/clear")
def clear(service: AnyService, caller: AnyCaller, partition: Partition) -> dict[str, int | None]:
    """Remove the caller's entries, and return their number: null for one tenant of several.

    A running request finishes; its state is stored after the clearing.
    """
    removed = service.clear(partition)
    return {"cleared": removed if caller.operator else None}


@router.post("/v1/cache/purge")
async def purge(
    service: AnyService, caller: AnyCaller, body: PurgeRequest
) -> dict[str, int | None]:
    """Remove entries until no byte of them is left.

    A tenant removes its own entries, the operator anybody's. What was removed, or with `dry_run`
    would be, is null for one tenant of several.
    """
    if not body.all and (body.partition, body.epoch, body.donor, body.older_than) == (None,) * 4:
        raise InputError(
            "nothing is selected: give partition, epoch, donor or older_than, or all=true"
        )

    if not caller.operator and body.partition not in (None, caller.partition):
        raise RefusedError(
            403, "only the operator's key purges other partitions: leave partition out"
        )

    purged = await run_in_threadpool(_purge, service, caller, body)
    return {name: getattr(purged, name) if caller.operator else None for name in _PURGED}


def _purge(service: GenerateService, caller: ApiCaller, body: PurgeRequest) -> PurgeResult:
    partition = body.partition if caller.operator else caller.partition
    donors: tuple[str, ...] = ()
    if body.donor is not None:
        where = partition or caller.partition
        donors = (service.entries_named(where, body.donor) if where is not None else ()) or (
            body.donor,
        )

    return service.purge(
        Selection(partition, body.epoch, donors, body.older_than), dry_run=body.dry_run
    )


def _encoder(figures: dict[str, object], caller: ApiCaller) -> dict[str, float]:
    numbers = {
        name: float(value) for name, value in figures.items() if isinstance(value, int | float)
    }
    return numbers if caller.operator else {name: numbers[name] for name in _OWN}

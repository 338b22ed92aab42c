"""Endpoints for the operator: `/health`, `/ready` and `/metrics`; `/` leads to the list of all."""

from fastapi import APIRouter, Depends, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request as HttpRequest

from dejakv.metrics import CacheCollector
from dejakv.server.access import operator_only
from dejakv.server.service import AnyService

router = APIRouter(tags=["operations"])


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """Report that the process responds."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready",
    responses={503: {"description": "The engine's thread has ended or the server shuts down."}},
)
async def ready(response: Response, service: AnyService) -> dict[str, str]:
    """Report whether the model is loaded and accepts requests."""
    if not service.worker.alive:
        response.status_code = 503
        return {"status": "not ready"}
    return {"status": "ready", "model": service.model_name}


@router.get(
    "/metrics",
    dependencies=[Depends(operator_only)],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
def metrics(service: AnyService) -> Response:
    """Return the figures of the whole process in Prometheus' text format.

    They name no partition. Where API keys are required, only the operator's key opens it: a tenant
    could subtract its own figures and infer the others'.
    """
    # Of this server alone: nothing is registered globally.
    registry = CollectorRegistry()
    cache, worker = service.cache, service.worker
    encoder = worker.pipeline.engine.encoder_cache
    registry.register(
        CacheCollector(
            encoder=encoder.stats if encoder is not None else None,
            stores={"chunks": cache.store.stats},
            levels=lambda: cache.stats(None),
            waiting=lambda: cache.queue.counts,
            trust=lambda: cache.trust(None),
            requests=worker.totals,
            server=lambda: worker,
        )
    )

    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def home(http: HttpRequest) -> RedirectResponse:
    """Redirect a person with a browser to the endpoints."""
    return RedirectResponse(f"{http.scope.get('root_path', '')}/docs")

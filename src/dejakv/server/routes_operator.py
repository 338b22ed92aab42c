"""For the operator: `/health`, `/ready` and `/metrics`; `/` leads to the endpoints."""

from collections.abc import Iterable

from fastapi import APIRouter, Depends, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest

from dejakv.metrics import CacheCollector
from dejakv.server.access import operator_only
from dejakv.server.service import AnyService
from dejakv.server.worker import RequestWorker

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health() -> dict[str, str]:
    """The process responds."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "The engine's thread has ended or the server shuts down."}})
async def ready(response: Response, service: AnyService) -> dict[str, str]:
    """The model is loaded and accepts requests."""
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
    """Prometheus' text format. Figures of the whole process, without any partition's name. Where API keys are required,
    only the operator's key opens it: a tenant could subtract its own figures and infer the others'."""
    registry = CollectorRegistry()  # of this server alone: nothing is registered globally
    registry.register(ServerCollector(service.worker))
    cache, encoder = service.cache, service.worker.pipeline.engine.encoder_cache
    registry.register(
        CacheCollector(
            encoder=encoder.stats if encoder is not None else None,
            stores={"chunks": cache.store.stats},
            levels=lambda: cache.stats(None),
            waiting=lambda: cache.queue.counts,
            trust=lambda: cache.trust(None),
            requests=service.worker.totals,
        )
    )
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class ServerCollector(Collector):
    """The worker's counters: requests and queue."""

    def __init__(self, worker: RequestWorker) -> None:
        self.worker = worker

    def collect(self) -> Iterable[Metric]:
        worker = self.worker
        requests = CounterMetricFamily("dejakv_server_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome in ("served", "refused", "cancelled", "failed"):
            requests.add_metric([outcome], getattr(worker, outcome))
        yield requests
        yield GaugeMetricFamily("dejakv_server_queue", "Requests that wait.", value=worker.waiting)


@router.get("/", include_in_schema=False)
async def home(http: HttpRequest) -> RedirectResponse:
    """To the endpoints, for a person with a browser."""
    return RedirectResponse(f"{http.scope.get('root_path', '')}/docs")

"""For the operator: `/`, a page for a person with a browser, `/health`, `/ready` and `/metrics`."""

from collections.abc import Iterable
from html import escape
from typing import Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest

from dejakv import __version__
from dejakv.http.keys import Caller
from dejakv.metrics import CacheCollector
from dejakv.server.access import caller_of, operator_only
from dejakv.server.service import AnyService, Service
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
        yield CounterMetricFamily(
            "dejakv_server_held_up",
            "Requests that arrived while a prompt was promoted or a label made.",
            value=worker.held_up,
        )
        yield CounterMetricFamily(
            "dejakv_server_held_up_seconds", "Seconds that they waited for it.", value=worker.held_up_seconds
        )


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>DejaKV: {model}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ background: #8882; padding: 1rem; overflow-x: auto }}
td, th {{ text-align: left; padding-right: 2rem }}
</style>
<h1>DejaKV {version}</h1>
<p>This server answers with the model <b>{model}</b> and reuses the state of earlier prompts. <code>/v1/generate</code> reuses
{reuse} where a request does not choose.</p>
<h2>Call it</h2>
<pre>curl -sS {url}v1/generate -H 'Content-Type: application/json' {key}\\
  -d '{{"prompt": "Hello", "max_new_tokens": 16, "temperature": 0}}'</pre>
<p>OpenAI's clients: <code>base_url="{url}v1"</code>. {note}</p>
<p><a href="{root}/docs">All endpoints</a>, <a href="{root}/openapi.json">OpenAPI</a>, <a href="{root}/ready">readiness</a>,
<a href="{root}/metrics">metrics</a>.</p>
<h2>Figures</h2>
{figures}
</html>
"""
_REUSE = {
    "exact": "equal prompts and prefixes only",
    "adopt": "similar prompts (adopt)",
    "blend": "similar prompts (blend)",
    "top_layer": "the top layer of similar prompts (top_layer)",
}
_HIDDEN = "<p>Send your API key to <code>/v1/cache/stats</code> for the figures of your own requests.</p>"


@router.get("/", include_in_schema=False)
async def home(http: HttpRequest, service: AnyService) -> HTMLResponse:
    """The page. It shows no figures to a caller without a key where keys are required."""
    caller: Caller | None = caller_of(http)
    keyed = caller is None or caller.partition is None or not caller.operator
    values = {
        "model": service.model_name,
        "version": __version__,
        "reuse": _REUSE[service.settings.reuse],
        "url": str(http.base_url),
        "root": http.scope.get("root_path", ""),
        "key": "-H 'Authorization: Bearer KEY' " if keyed else "",
        "note": "Every request needs an API key." if keyed else "No API key is needed.",
    }
    shown = {name: escape(value) for name, value in values.items()}
    return HTMLResponse(_PAGE.format(**shown, figures=_HIDDEN if caller is None else _figures(service, caller)))


def _figures(service: Service, caller: Caller) -> str:
    counts = service.cache.stats(caller.partition)
    rows: list[tuple[str, Any]] = [("requests that looked for state", counts.lookups)]
    rows += [(f"reused, by {level}", count) for level, count in sorted(counts.hits.items())]
    rows += [("reused, an exact prefix", counts.prefix_hits), ("computed in full", counts.misses)]
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{value}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"

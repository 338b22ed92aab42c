"""The process's figures for Prometheus: requests, queue, levels, store, encoder registry. They name no partition."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dejakv.metrics import CacheCollector
from dejakv.server.worker import Worker


class ServerCollector(Collector):
    """Reads the worker's counters when Prometheus asks."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def collect(self) -> Iterable[Metric]:
        worker = self.worker
        requests = CounterMetricFamily("dejakv_server_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome in ("served", "refused", "cancelled", "failed"):
            requests.add_metric([outcome], getattr(worker, outcome))
        yield requests
        yield GaugeMetricFamily("dejakv_server_queue", "Requests that wait.", value=worker.waiting)
        held_up = worker.idle.held_up
        yield CounterMetricFamily(
            "dejakv_server_held_up",
            "Requests that arrived while a prompt was promoted or a label made.",
            value=held_up.requests,
        )
        yield CounterMetricFamily(
            "dejakv_server_held_up_seconds", "Seconds that they waited for it.", value=held_up.seconds
        )


def registry_of(worker: Worker) -> CollectorRegistry:
    """A registry for this server only: nothing is registered globally."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(worker))
    cache = worker.pipeline.cache
    audits = cache.audits if cache is not None else None
    encoder = worker.pipeline.engine.encoder_cache
    registry.register(
        CacheCollector(
            encoder=encoder.stats if encoder is not None else None,
            stores={"chunks": cache.store.stats} if cache is not None else None,
            levels=(lambda: cache.stats(None)) if cache is not None else None,
            promotions=(lambda: cache.promotions.counts) if cache is not None else None,
            trust=(lambda: cache.trust(None)) if cache is not None else None,
            labels_waiting=audits.__len__ if audits is not None else None,
            requests=worker.totals,
        )
    )
    return registry

"""The process's figures for Prometheus: requests, queue, store, encoder registry. No partition shows in them."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dejakv.server.worker import Worker


class ServerCollector(Collector):
    """Reads the worker's and its cache's counters when Prometheus asks."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def collect(self) -> Iterable[Metric]:
        worker = self.worker
        requests = CounterMetricFamily("dejakv_server_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome in ("served", "cancelled", "failed"):
            requests.add_metric([outcome], getattr(worker, outcome))
        yield requests
        yield GaugeMetricFamily("dejakv_server_queue", "Requests that wait.", value=worker.waiting)


def registry_of(worker: Worker) -> CollectorRegistry:
    """A registry of this server alone: nothing is registered globally."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(worker))
    return registry

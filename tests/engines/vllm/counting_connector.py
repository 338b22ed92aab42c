"""A connector of somebody else's, with statistics of its own: vLLM's example connector that counts its steps."""

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


class CountingStats(KVConnectorStats):
    def reset(self):
        self.data = {}

    def aggregate(self, other):
        return CountingStats({"steps": self.data.get("steps", 0) + other.data.get("steps", 0)})

    def reduce(self):
        return dict(self.data)

    def is_empty(self):
        return not self.data


class CountingMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.steps = metric_types[Counter](name="vllm:counted_steps", documentation="Steps.", labelnames=labelnames)
        self.folder = vllm_config.kv_transfer_config.kv_connector_extra_config["shared_storage_path"]

    def observe(self, transfer_stats_data, engine_idx=0):
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        self.steps.labels(*labels).inc(transfer_stats_data["steps"])


class CountingConnector(ExampleConnector):
    def get_kv_connector_stats(self):
        return CountingStats({"steps": 1})

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return CountingStats(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return CountingMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

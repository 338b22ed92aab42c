# pyright: reportMissingImports=false
"""DejaKV's figures on the server's `/metrics`, through vLLM's own seam for connectors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from dejakv.engines.vllm.inner import inner_class

METRICS: dict[str, tuple[str, str]] = {
    "lookups": ("Lookups by what they found (exact, blend, miss).", "found"),
    "lookup_seconds": ("Seconds spent in lookups, off the engine loop.", ""),
    "comparisons_failed": ("Lookups in which prompts could not be compared as text, by error.", "error"),
    "loads": ("Stored states put into the KV cache.", ""),
    "loaded_bytes": ("Bytes of state put into the KV cache.", ""),
    "loaded_donors": ("Stored prompts whose state was put in; of one load several where it is blended.", ""),
    "donors_left_out": ("Donors that a blend was to take state from and did not, by reason.", "reason"),
    "load_seconds": ("Seconds from the order of a load to its end.", ""),
    "load_failures": ("Loads that became misses, by reason.", "reason"),
    "saves": ("Prompts whose state was stored and confirmed.", ""),
    "rows_kept": ("Rows of blended prompts that were stored for later blends.", ""),
    "promotions": ("Blended prompts that were computed exactly in idle time.", ""),
    "saves_dropped": ("Saves that were not made, by reason.", "reason"),
}


INNER = "inner"
"""Where a wrapped connector's figures stand among ours."""


@dataclass
class DejaKVStats(KVConnectorStats):
    """Counters of one interval, as `counts.Counts.take` gives them.

    inner  a wrapped connector's own figures
    wraps  its configuration, which leads to its class where only plain values arrive
    """

    inner: KVConnectorStats | None = None
    wraps: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "DejaKVStats":
        """What `to_dict` made plain values of."""
        values = dict(data)
        theirs = values.pop(INNER, None)
        kind = None if theirs is None else inner_class({"inner": theirs["wraps"]})
        if theirs is None or kind is None:
            return cls(values)
        return cls(values, kind.build_kv_connector_stats(theirs["data"]), theirs["wraps"])

    def to_dict(self) -> dict[str, Any]:
        theirs = {} if self.inner is None else {INNER: {"wraps": dict(self.wraps), "data": self.inner.to_dict()}}
        return {**self.data, **theirs}

    def reset(self) -> None:
        self.data, self.inner = {}, None

    def aggregate(self, other: KVConnectorStats) -> "DejaKVStats":
        assert isinstance(other, DejaKVStats)
        merged = dict(self.data)
        for key, value in other.data.items():
            merged[key] = merged.get(key, 0) + value
        theirs = self.inner or other.inner
        if self.inner is not None and other.inner is not None:
            theirs = self.inner.aggregate(other.inner)
        return DejaKVStats(merged, theirs, self.wraps or other.wraps)

    def reduce(self) -> dict[str, int | float]:
        theirs = {} if self.inner is None else {f"{INNER}:{key}": value for key, value in self.inner.reduce().items()}
        return {key.replace("|", ":"): value for key, value in self.data.items()} | theirs

    def is_empty(self) -> bool:
        return not self.data and (self.inner is None or self.inner.is_empty())


class DejaKVPromMetrics(KVConnectorPromMetrics):
    """`vllm:dejakv_*_total` counters, labelled by engine and, where there is one, by reason or result. `inner`: the metrics of a
    wrapped connector, which go by its own names."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        inner: KVConnectorPromMetrics | None = None,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._inner = inner
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:dejakv_{name}", documentation=about, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (about, label) in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        theirs = transfer_stats_data.get(INNER)
        if theirs is not None and self._inner is not None:
            self._inner.observe(theirs["data"], engine_idx)
        engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition("|")
            if name in self._counters:
                labels = [*engine, *([label or "unknown"] if METRICS[name][1] else [])]
                counter: Counter = self._counters[name].labels(*labels)
                counter.inc(value)

# pyright: reportMissingImports=false
"""The connector's series on the server's `/metrics`, through vLLM's own seam for connectors."""

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from dejakv.decide.bound import CERTIFICATE
from dejakv.engines.base import LATE
from dejakv.engines.vllm import scheduler, worker
from dejakv.engines.vllm.blend import blend, fused
from dejakv.engines.vllm.generations import CHANGED, RESET, UNCLEAN
from dejakv.engines.vllm.request import short
from dejakv.engines.vllm.transfers import loads, saves

METRICS: dict[str, tuple[str, str]] = {
    "lookups": ("Lookups by what they found (exact, blend, miss).", "found"),
    "lookup_seconds": ("Seconds spent in lookups, off the engine loop.", ""),
    "withheld": ("Blends that the certificate withheld, by reason.", "reason"),
    "loads": ("Stored states put into the KV cache.", ""),
    "loaded_bytes": ("Bytes of state put into the KV cache.", ""),
    "loaded_donors": (
        "Stored prompts whose state was put in; of one load several where it is blended.",
        "",
    ),
    "donors_left_out": (
        "Donors that a blend was to take state from and did not, by reason.",
        "reason",
    ),
    "load_seconds": ("Seconds from the order of a load to its end.", ""),
    "load_failures": (
        "Loads that ended without state, by reason; of clients that left, too.",
        "reason",
    ),
    "blends_refused": (
        "Prompts that were not blended though they could have been, by reason.",
        "reason",
    ),
    "saves": ("Prompts whose state was stored and confirmed.", ""),
    "rows_kept": ("Rows of blended prompts that were stored for later blends.", ""),
    "saves_dropped": ("Saves that were not made, by reason.", "reason"),
    "kernel_fallbacks": (
        "Workers on a GPU that copy the state of blends without the fused kernel, by reason.",
        "reason",
    ),
    "unpinned_loads": (
        "Loads whose state went to a GPU from memory that is not pinned, since `pinned_bytes` had "
        "no room.",
        "",
    ),
    "bucket_away_seconds": ("Seconds for which the bucket's service failed.", ""),
    "feed_away_seconds": ("Seconds for which the feed's service failed.", ""),
}

KNOWN: dict[str, tuple[str, ...]] = {
    "lookups": ("exact", "blend", "miss"),
    "withheld": (
        f"{CERTIFICATE} does not serve such a plan",
        f"{CERTIFICATE} has no prompt as long in its log",
        f"{CERTIFICATE} is not of such a hit",
        f"{CERTIFICATE} is of another model or engine",
        f"{CERTIFICATE} is of another bound",
        f"{CERTIFICATE} is of another version of dejakv",
        f"{CERTIFICATE} is of another setting",
        f"{CERTIFICATE} opens no rule",
    ),
    "donors_left_out": (loads.GONE,),
    "load_failures": (
        LATE,
        blend.ELSEWHERE,
        blend.FAILED,
        loads.GONE,
        loads.SHORT,
        loads.SLOW,
        loads.STORE_FAILED,
        loads.DRAFT_FAILED,
        RESET,
        CHANGED,
    ),
    "kernel_fallbacks": (
        fused.NO_TRITON,
        fused.NO_STRIDES,
        fused.NO_TABLES,
        fused.FAILED,
        fused.WRONG,
    ),
    "blends_refused": (
        scheduler.NO_GAIN,
        scheduler.TOO_LONG,
        scheduler.FAR,
        scheduler.SMALL_SHARE,
        scheduler.UNLABELLED,
    ),
    "saves_dropped": (
        saves.BACKLOG,
        saves.ENDED,
        saves.TOO_LARGE,
        saves.UNPROVEN,
        worker.REFUSED,
        worker.UNWANTED,
        worker.WINDOWS,
        worker.NO_MEMORY,
        "error",
        RESET,
        CHANGED,
        UNCLEAN,
    ),
}
"""Values of a metric's label that are known before the first event.

Errors of a store and a late load name more."""


@dataclass
class DejaKVStats(KVConnectorStats):
    """Counters of one interval, as `ConnectorCounts.take` returns them."""

    def reset(self) -> None:
        """Forget all counters."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "DejaKVStats":
        """Add the counters of another side or rank."""
        assert isinstance(other, DejaKVStats)
        merged = dict(self.data)
        for key, value in other.data.items():
            merged[key] = merged.get(key, 0) + value
        return DejaKVStats(merged)

    def reduce(self) -> dict[str, int | float]:
        """Return the counters for vLLM's log."""
        return {key.replace("|", ":"): value for key, value in self.data.items()}

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return not self.data


class DejaKVPromMetrics(KVConnectorPromMetrics):
    """Counters `vllm:dejakv_*_total`, by engine and, where there is one, by reason or result.

    Each begins with 0, so that an alert sees an event that never happens.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:dejakv_{name}",
                documentation=about,
                labelnames=[*labelnames, *([label] if label else [])],
            )
            for name, (about, label) in METRICS.items()
        }

        # A series that first appears with its first event has no increase that a rate could see.
        for engine in per_engine_labelvalues:
            zeros = [f"{name}|{short(value)}" for name, values in KNOWN.items() for value in values]
            zeros += [name for name, (_, label) in METRICS.items() if not label]
            self.observe(dict.fromkeys(zeros, 0), engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counters of an engine to its series."""
        engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition("|")
            if name in self._counters:
                labels = [*engine, *([label or "unknown"] if METRICS[name][1] else [])]
                counter: Counter = self._counters[name].labels(*labels)
                counter.inc(value)

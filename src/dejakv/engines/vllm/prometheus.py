# pyright: reportMissingImports=false
"""The connector's series on vLLM's `/metrics`. Each begins with 0, so that an alert sees a thing that never happens."""

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from dejakv.decide.bound import CERTIFICATE
from dejakv.engines.base import LATE
from dejakv.engines.vllm import loads, saves, scheduler, worker
from dejakv.engines.vllm.blend import blend
from dejakv.engines.vllm.generations import CHANGED, RESET, UNCLEAN
from dejakv.engines.vllm.stats import METRICS, short

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
    "blends_refused": (scheduler.NO_GAIN, scheduler.TOO_LONG, scheduler.FAR, scheduler.UNLABELLED),
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
"""Values of a metric's label that are known before the first event; errors of a store and a late load name more."""


class DejaKVPromMetrics(KVConnectorPromMetrics):
    """`vllm:dejakv_*_total` counters, labelled by engine and, where there is one, by reason or result."""

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
                name=f"vllm:dejakv_{name}", documentation=about, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (about, label) in METRICS.items()
        }

        # a series that first appears with its first event has no increase that a rate could see
        for engine in per_engine_labelvalues:
            zeros = [f"{name}|{short(value)}" for name, values in KNOWN.items() for value in values]
            zeros += [name for name, (_, label) in METRICS.items() if not label]
            self.observe(dict.fromkeys(zeros, 0), engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for key, value in transfer_stats_data.items():
            name, _, label = key.partition("|")
            if name in self._counters:
                labels = [*engine, *([label or "unknown"] if METRICS[name][1] else [])]
                counter: Counter = self._counters[name].labels(*labels)
                counter.inc(value)

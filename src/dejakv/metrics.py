"""Prometheus: plain statistics in, one collector out. Needs the extra `metrics`; every name is in docs/metrics.md.

    registry = CollectorRegistry()
    registry.register(CacheCollector(encoder=cache.stats, stores={"chunks": store.stats}, requests=totals))

Nothing is registered globally, nothing carries a partition's name: a scrape is the operator's view.
"""

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dejakv.decide.counts import CacheCounts
from dejakv.decide.queue import QueueCounts
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.errors import MissingExtraError
from dejakv.records import Record
from dejakv.store.base import StoreStats
from dejakv.trust.report import TrustReport

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError("prometheus-client", "metrics", "exporting figures to Prometheus") from error

BUCKETS: Final = (0.00005, 0.0002, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histograms, in seconds."""

Figures = Mapping[str, tuple[str, str]]
"""By a name in some statistics: the name of the metric, and its meaning."""

ENCODER: Final[Figures] = {
    "hits": ("visual_cache_hits", "Encoder outputs served without running the encoder."),
    "misses": ("visual_cache_misses", "Requests for encoder outputs that nobody had."),
    "coalesced": ("visual_cache_coalesced", "Hits of callers who waited for somebody else's encoder run."),
    "vram_saved_bytes": ("visual_vram_saved_bytes", "Bytes of the outputs served without running the encoder."),
    "dp_mode_recommendations": ("dp_mode_recommendations", "Recommendations of --mm-encoder-tp-mode data."),
    "disk_hits": ("visual_disk_hits", "Encoder outputs found on disk."),
    "disk_misses": ("visual_disk_misses", "Encoder outputs not found on disk, damaged ones included."),
    "disk_corrupt": ("visual_disk_corrupt", "Damaged encoder outputs on disk."),
    "encoder_runs": ("visual_encoder_runs", "Pictures, sounds and clips that were encoded."),
    "encoder_failures": ("visual_encoder_failures", "Encoder runs that raised or gave no usable output."),
    "encoder_seconds": ("visual_encoder_seconds", "Seconds spent encoding."),
    "encoder_seconds_saved": ("visual_encoder_seconds_saved", "Seconds of encoding that hits made unnecessary."),
}
ENCODER_NOW: Final[Figures] = {
    "hit_rate": ("visual_cache_hit_ratio", "Hits by hits and misses since the start."),
    "entries": ("visual_cache_entries", "Encoder outputs in memory."),
    "bytes": ("visual_cache_bytes", "Bytes of the encoder outputs in memory."),
    "max_entries": ("visual_cache_max_entries", "Budget of encoder outputs in memory."),
    "max_bytes": ("visual_cache_max_bytes", "Budget of encoder outputs in bytes."),
    "waiting_callers": ("visual_cache_waiting_callers", "Callers that wait for somebody else's encoder run."),
}
STORE: Final[Figures] = {
    "hits": ("store_hits", "Chunks that were found."),
    "misses": ("store_misses", "Chunks that were not found."),
    "puts": ("store_puts", "Chunks that were stored."),
    "corrupt": ("store_corrupt", "Damaged chunks that were set aside."),
}
TOKENS: Final[Figures] = {
    "prompt_tokens": ("prompt_tokens", "Tokens of the prompts."),
    "computed_tokens": ("computed_tokens", "Prompt tokens that were computed."),
    "reused_tokens": ("reused_tokens", "Prompt tokens whose state was reused."),
    "output_tokens": ("output_tokens", "Tokens of the answers."),
    "encoder_runs": ("request_encoder_runs", "Pictures encoded for requests."),
    "bytes_loaded": ("loaded_bytes", "Bytes of state put into models."),
}
TRUST: Final[Figures] = {
    "explored": ("trust_explored", "Would-be hits that were computed both ways while no rule covered them."),
    "explored_wrong": ("trust_explored_wrong", "Those of them whose approximate answer was wrong."),
    "served": ("trust_served", "Would-be hits that the error bound let through."),
    "audited": ("trust_audited", "Those of them that were computed in full as well."),
    "wrong": ("trust_wrong", "Audited answers that were wrong."),
    "lost": ("trust_lost", "Labels that were dropped before they were begun."),
    "alarms": ("trust_alarms", "Gates that drift has closed."),
}
LEVELS: Final[Figures] = {
    "lookups": ("lookups", "Requests that looked for a donor."),
    "prefix_hits": ("prefix_hits", "Lookups that found an exact prefix."),
    "promotions": ("promotions", "Approximately answered prompts computed exactly in idle time."),
    "unpromoted": ("promotions_failed", "Such prompts that could not be."),
    "rows_kept": ("rows_kept", "Rows of blended prompts kept for later blends."),
}
TRUST_NOW: Final[Figures] = {
    "delta": ("trust_bound", "Largest share of wrong answers that is allowed."),
    "rules": ("trust_rules_open", "Rules that let approximate answers through."),
    "upper": ("trust_upper", "Upper end of the share of wrong answers served now."),
}
WAITING_NOW: Final[Figures] = {
    "promotions": ("promotions_waiting", "Approximately answered prompts that wait for idle time."),
    "labels": ("trust_waiting", "Hits that wait for their label."),
}
WAITING: Final[Figures] = {"dropped": ("promotions_dropped", "Such prompts dropped for want of room.")}
TIMES: Final[Figures] = {
    "ttft_ms": ("ttft_seconds", "Time to the first token."),
    "latency_ms": ("latency_seconds", "Time to the last token."),
    "lookup_ms": ("lookup_seconds", "Time to find a donor."),
}


class RequestTotals:
    """Sums over records, kept as requests are served. Thread-safe; memory does not grow with requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: Counter[tuple[str, str]] = Counter()
        self._sums: Counter[str] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, record: Record) -> None:
        """Counts one served request."""
        with self._lock:
            self._served[record.method, record.level] += 1
            for name in TOKENS:
                self._sums[name] += getattr(record, name)
            for name in TIMES:
                seconds = getattr(record, name) / 1000
                self._buckets[name][bisect_left(BUCKETS, seconds)] += 1
                self._seconds[name] += seconds

    def metrics(self) -> Iterator[Metric]:
        """The sums as Prometheus metrics."""
        with self._lock:
            requests = CounterMetricFamily(
                "dejakv_requests", "Requests by what was reused.", labels=["method", "level"]
            )
            for labels, count in self._served.items():
                requests.add_metric(labels, count)
            yield requests
            for name, (exported, about) in TOKENS.items():
                yield CounterMetricFamily(f"dejakv_{exported}", about, value=self._sums[name])
            for name, (exported, about) in TIMES.items():
                total, buckets = 0, list[tuple[str, float]]()
                for bound, count in zip([*map(str, BUCKETS), "+Inf"], self._buckets[name], strict=True):
                    total += count
                    buckets.append((bound, total))
                yield HistogramMetricFamily(f"dejakv_{exported}", about, buckets, self._seconds[name])


class CacheCollector(Collector):
    """Reads the figures of whatever it is given when Prometheus asks.

    encoder   `VisualKVCache.stats`
    stores    `Store.stats` by the name they are to have
    levels    counts of the levels, all partitions together
    waiting   prompts that wait for idle time
    trust     what is known of the error bound, None without one
    requests  sums over records
    """

    def __init__(
        self,
        *,
        encoder: Callable[[], EncoderCacheStats] | None = None,
        stores: Mapping[str, Callable[[], StoreStats]] | None = None,
        levels: Callable[[], CacheCounts] | None = None,
        waiting: Callable[[], QueueCounts] | None = None,
        trust: Callable[[], TrustReport | None] | None = None,
        requests: RequestTotals | None = None,
    ) -> None:
        self._encoder = encoder
        self._stores = dict(stores or {})
        self._levels = levels
        self._waiting = waiting
        self._trust = trust
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """All metrics, read now."""
        if self._encoder is not None:
            stats = self._encoder()
            yield from _figures(CounterMetricFamily, ENCODER, stats)
            yield from _figures(GaugeMetricFamily, ENCODER_NOW, stats)
            yield _counted(
                "visual_cache_evictions", "Encoder outputs that left memory, by reason.", "reason", stats.evictions
            )
            yield _counted(
                "visual_cache_refusals", "Encoder outputs not kept in memory, by reason.", "reason", stats.refusals
            )
        if self._stores:
            yield from _store_metrics({name: stats() for name, stats in self._stores.items()})
        if self._levels is not None:
            counts = self._levels()
            yield from _figures(CounterMetricFamily, LEVELS, counts)
            yield _counted("level_hits", "Donors found and trusted, by level.", "level", counts.hits)
            yield _counted("guard_rejections", "Donors that were not trusted, by guard.", "guard", counts.rejections)
        if self._waiting is not None:
            waiting = self._waiting()
            yield from _figures(GaugeMetricFamily, WAITING_NOW, waiting)
            yield from _figures(CounterMetricFamily, WAITING, waiting)
        report = self._trust() if self._trust is not None else None
        if report is not None:
            yield from _figures(CounterMetricFamily, TRUST, report)
            yield from _figures(GaugeMetricFamily, TRUST_NOW, report)
        if self._requests is not None:
            yield from self._requests.metrics()


def _figures(family: Any, figures: Figures, stats: object) -> Iterator[Metric]:
    """One metric for each figure that is known."""
    for name, (exported, about) in figures.items():
        if (value := getattr(stats, name)) is not None:
            yield family(f"dejakv_{exported}", about, value=value)


def _store_metrics(stores: Mapping[str, StoreStats]) -> Iterator[Metric]:
    """The figures of stores by name."""
    for name, (exported, about) in STORE.items():
        family = CounterMetricFamily(f"dejakv_{exported}", about, labels=["store"])
        for store, stats in stores.items():
            family.add_metric([store], getattr(stats, name))
        yield family
    for name, about in {"entries": "Chunks held.", "bytes": "Bytes held."}.items():
        held = GaugeMetricFamily(f"dejakv_store_{name}", about, labels=["store"])
        for store, stats in stores.items():
            held.add_metric([store], getattr(stats, name))
        yield held
    for name, about in {
        "evictions": "Chunks that left, by reason.",
        "refused": "Chunks not stored, by reason.",
    }.items():
        counted = CounterMetricFamily(f"dejakv_store_{name}", about, labels=["store", "reason"])
        for store, stats in stores.items():
            for reason, count in getattr(stats, name).items():
                counted.add_metric([store, reason], count)
        yield counted


def _counted(name: str, about: str, label: str, counts: Mapping[str, int]) -> Any:
    family = CounterMetricFamily(f"dejakv_{name}", about, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family

"""Prometheus metrics: plain statistics in, one collector out. Needs the extra `metrics`.

    registry = CollectorRegistry()
    stores = {"chunks": store.stats}
    registry.register(CacheCollector(encoder=cache.stats, stores=stores, requests=totals))

Every name is in docs/reference/metrics.md. Nothing is registered globally, and nothing carries a
partition's name: a scrape is the operator's view.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dejakv.decide.counts import CacheCounts
from dejakv.decide.queue import QueueCounts
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.errors import MissingExtraError
from dejakv.records import Record
from dejakv.store.base import StoreStats
from dejakv.store.counters import EVICTION_REASONS, FAILED_WRITES
from dejakv.trust.report import TrustReport

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError(
        "prometheus-client", "metrics", "exporting figures to Prometheus"
    ) from error

BUCKETS: Final = (
    0.00005,
    0.0002,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Upper bounds of the histograms, in seconds."""

Figures = Mapping[str, tuple[str, str]]
"""The name of the metric and its meaning, by the name in some statistics."""
Labelled = Mapping[str, tuple[str, str, str, tuple[str, ...]]]
"""Counts by reason, level or guard: metric, meaning, label, and known values of the label.

The series of known values begin with 0, since a series that first appears with an event has no
increase that a rate could see.
"""

EVICTIONS: Final = ("entries", "bytes", "replaced")
REFUSALS: Final = ("oversized", "minimum")
"""Reasons for which encoder outputs are not kept in memory."""
REFUSED_ENTRIES: Final = (
    "too_short",
    "first_sight",
    "rate",
    "too_large",
    "parent",
    "invalid",
    "busy",
)
"""Reasons for which an entry is not stored, beside failures of the place."""

ENCODER: Final[Figures] = {
    "hits": ("visual_cache_hits", "Encoder outputs served without running the encoder."),
    "misses": ("visual_cache_misses", "Requests for encoder outputs that nobody had."),
    "coalesced": (
        "visual_cache_coalesced",
        "Hits of callers who waited for somebody else's encoder run.",
    ),
    "vram_saved_bytes": (
        "visual_vram_saved_bytes",
        "Bytes of the outputs served without running the encoder.",
    ),
    "dp_mode_recommendations": (
        "dp_mode_recommendations",
        "Recommendations of --mm-encoder-tp-mode data.",
    ),
    "disk_hits": ("visual_disk_hits", "Encoder outputs found on disk."),
    "disk_misses": (
        "visual_disk_misses",
        "Encoder outputs not found on disk, damaged ones included.",
    ),
    "disk_corrupt": ("visual_disk_corrupt", "Damaged encoder outputs on disk."),
    "encoder_runs": ("visual_encoder_runs", "Pictures, sounds and clips that were encoded."),
    "encoder_failures": (
        "visual_encoder_failures",
        "Encoder runs that raised or gave no usable output.",
    ),
    "encoder_seconds": ("visual_encoder_seconds", "Seconds spent encoding."),
    "encoder_seconds_saved": (
        "visual_encoder_seconds_saved",
        "Seconds of encoding that hits made unnecessary.",
    ),
}
ENCODER_NOW: Final[Figures] = {
    "hit_rate": ("visual_cache_hit_ratio", "Hits by hits and misses since the start."),
    "entries": ("visual_cache_entries", "Encoder outputs in memory."),
    "bytes": ("visual_cache_bytes", "Bytes of the encoder outputs in memory."),
    "max_entries": ("visual_cache_max_entries", "Budget of encoder outputs in memory."),
    "max_bytes": ("visual_cache_max_bytes", "Budget of encoder outputs in bytes."),
    "waiting_callers": (
        "visual_cache_waiting_callers",
        "Callers that wait for somebody else's encoder run.",
    ),
}
ENCODER_BY: Final[Labelled] = {
    "evictions": (
        "visual_cache_evictions",
        "Encoder outputs that left memory, by reason.",
        "reason",
        EVICTIONS,
    ),
    "refusals": (
        "visual_cache_refusals",
        "Encoder outputs not kept in memory, by reason.",
        "reason",
        REFUSALS,
    ),
}
STORE: Final[Figures] = {
    "hits": ("store_hits", "Entries that were found."),
    "misses": ("store_misses", "Entries that were not found."),
    "puts": ("store_puts", "Entries that were stored."),
    "corrupt": ("store_corrupt", "Damaged entries that were set aside."),
    "late": ("store_late", "Reads from a bucket that were given up at their deadline; misses too."),
}
STORE_NOW: Final[Figures] = {
    "entries": ("store_entries", "Entries held."),
    "bytes": ("store_bytes", "Bytes held."),
    "bucket_away_seconds": (
        "store_bucket_away_seconds",
        "For how long the bucket's service has failed; 0: it answers.",
    ),
    "feed_away_seconds": (
        "store_feed_away_seconds",
        "For how long the feed's service has failed; 0: it answers.",
    ),
}
STORE_BY: Final[Labelled] = {
    "evictions": (
        "store_evictions",
        "Entries that left, by reason.",
        "reason",
        EVICTION_REASONS,
    ),
    "refused": (
        "store_refused",
        "Entries not stored, by reason.",
        "reason",
        (*REFUSED_ENTRIES, *FAILED_WRITES),
    ),
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
    "explored": (
        "trust_explored",
        "Would-be hits that were computed both ways while no rule covered them.",
    ),
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
LEVELS_BY: Final[Labelled] = {
    "hits": ("level_hits", "Donors found and trusted, by level.", "level", ()),
    "rejections": ("guard_rejections", "Donors that were not trusted, by guard.", "guard", ()),
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
WAITING: Final[Figures] = {
    "dropped": ("promotions_dropped", "Such prompts dropped for want of room.")
}
SERVER_NOW: Final[Figures] = {"waiting": ("server_queue", "Requests that wait.")}
SERVER_BY: Final[Labelled] = {
    "outcomes": ("server_requests", "Requests by how they ended.", "outcome", ())
}
_UNITS: Final = ("tokens", "characters")
STABILIZE_BY: Final[Labelled] = {
    "requests": (
        "stabilize_requests",
        "Chat requests: changed by a rule, unchanged, or with a body that is not known in full.",
        "outcome",
        ("changed", "unchanged", "unknown"),
    ),
    "rules": ("stabilize_rules", "Requests that a rule changed.", "rule", ()),
    "prompt": (
        "stabilize_prompt",
        "Length of known prompts, without the template's.",
        "unit",
        _UNITS,
    ),
    "prefix_given": (
        "stabilize_prefix_given",
        "Length in prefixes of earlier prompts, as requests came.",
        "unit",
        _UNITS,
    ),
    "prefix_sent": (
        "stabilize_prefix_sent",
        "Length in prefixes of earlier prompts, as requests were sent.",
        "unit",
        _UNITS,
    ),
    "checks": (
        "stabilize_checks",
        "Changed requests of which both forms were sent, by how their answers compare.",
        "answers",
        ("equal", "different", "not_compared"),
    ),
}
TIMES: Final[Figures] = {
    "ttft_ms": ("ttft_seconds", "Time to the first token."),
    "latency_ms": ("latency_seconds", "Time to the last token."),
    "lookup_ms": ("lookup_seconds", "Time to find a donor."),
}

Source = Callable[[], Any]


class RequestTotals:
    """Sums over records, added up as requests are served. Thread-safe, in constant memory."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._served = Counter(
            "dejakv_requests",
            "Requests by what was reused.",
            ["method", "level"],
            registry=registry,
        )
        # Begun with 0: a series that first appears with an event has no increase to see.
        for method, level in (("none", ""), ("prefix", "prefix"), ("exact", "exact_text")):
            self._served.labels(method, level)

        self._sums = {
            name: Counter(f"dejakv_{exported}", about, registry=registry)
            for name, (exported, about) in TOKENS.items()
        }
        self._times = {
            name: Histogram(f"dejakv_{exported}", about, registry=registry, buckets=BUCKETS)
            for name, (exported, about) in TIMES.items()
        }

    def add(self, record: Record) -> None:
        """Count one served request."""
        self._served.labels(record.method, record.level).inc()
        for name, total in self._sums.items():
            total.inc(getattr(record, name))
        for name, seconds in self._times.items():
            # Records have milliseconds, Prometheus wants base units.
            seconds.observe(getattr(record, name) / 1000)

    def metrics(self) -> Iterator[Metric]:
        """Yield the sums as Prometheus metrics."""
        for metric in self._registry.collect():
            # The client adds one for each series, and nobody reads when a counter began.
            metric.samples = [
                sample for sample in metric.samples if not sample.name.endswith("_created")
            ]
            yield metric


class CacheCollector(Collector):
    """Collector of Prometheus, which reads all figures at each scrape.

    Parameters
    ----------
    encoder : Callable[[], EncoderCacheStats] or None
        `VisualKVCache.stats`.
    stores : Mapping[str, Callable[[], StoreStats]] or None
        `Store.stats`, by exported name.
    levels : Callable[[], CacheCounts] or None
        Counts of the levels, all partitions together.
    waiting : Callable[[], QueueCounts] or None
        Prompts that wait for idle time.
    trust : Callable[[], TrustReport | None] or None
        Report on the error bound; None without one.
    requests : RequestTotals or None
        Sums over records.
    server : Callable[[], Any] or None
        Statistics with `outcomes` of requests and the number of `waiting` ones.
    stabilizer : Callable[[], Any] or None
        Counts of a stabilizing middleware.
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
        server: Source | None = None,
        stabilizer: Source | None = None,
    ) -> None:
        self._sources: list[tuple[Source | None, Figures, Figures, Labelled]] = [
            (encoder, ENCODER, ENCODER_NOW, ENCODER_BY),
            (levels, LEVELS, {}, LEVELS_BY),
            (waiting, WAITING, WAITING_NOW, {}),
            (trust, TRUST, TRUST_NOW, {}),
            (server, {}, SERVER_NOW, SERVER_BY),
            (stabilizer, {}, {}, STABILIZE_BY),
        ]
        self._stores = dict(stores or {})
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, read now."""
        for source, counters, gauges, labelled in self._sources:
            stats = source() if source is not None else None
            # A report may be missing for a while, as that of evidence that cannot be read.
            if stats is not None:
                for family, figures in (
                    (CounterMetricFamily, counters),
                    (GaugeMetricFamily, gauges),
                ):
                    for name, (exported, about) in figures.items():
                        # None is unknown, and 0 would be a value.
                        if (value := getattr(stats, name)) is not None:
                            yield family(f"dejakv_{exported}", about, value=value)
                for name, (exported, about, label, label_values) in labelled.items():
                    # Known values first: their series begin with 0 (see `Labelled`).
                    values = dict.fromkeys(label_values, 0) | getattr(stats, name)
                    counts = {(value,): count for value, count in values.items()}
                    yield _labelled_metric(CounterMetricFamily, exported, about, (label,), counts)

        if self._stores:
            yield from _store_metrics({name: stats() for name, stats in self._stores.items()})
        if self._requests is not None:
            yield from self._requests.metrics()


def _store_metrics(stores: Mapping[str, StoreStats]) -> Iterator[Metric]:
    """Yield the figures of stores, by name."""
    for family, figures in ((CounterMetricFamily, STORE), (GaugeMetricFamily, STORE_NOW)):
        for name, (exported, about) in figures.items():
            values_by_store = {(store,): getattr(stats, name) for store, stats in stores.items()}
            yield _labelled_metric(family, exported, about, ("store",), values_by_store)

    for name, (exported, about, label, label_values) in STORE_BY.items():
        by_store = {
            store: dict.fromkeys(label_values, 0) | getattr(stats, name)
            for store, stats in stores.items()
        }
        counts = {
            (store, value): n for store, values in by_store.items() for value, n in values.items()
        }
        yield _labelled_metric(CounterMetricFamily, exported, about, ("store", label), counts)


def _labelled_metric(
    family: Any,
    exported: str,
    about: str,
    labels: tuple[str, ...],
    values: Mapping[tuple[str, ...], float],
) -> Any:
    metric = family(f"dejakv_{exported}", about, labels=labels)
    for label_values, value in values.items():
        metric.add_metric(label_values, value)
    return metric

"""The Prometheus adapter: real statistics in, a scrape out; the documentation and the dashboard name what is exported."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dejakv.decide.counts import CacheCounts
from dejakv.decide.queue import QueueCounts
from dejakv.encoder_cache import VisualKVCache
from dejakv.metrics import CacheCollector, RequestTotals
from dejakv.records import Record
from dejakv.stabilize.middleware import StabilizeCounts
from dejakv.store.base import StoreStats
from dejakv.trust.report import TrustReport

ROOT = Path(__file__).parents[1]
TRUST = TrustReport(
    delta=0.01, confidence=0.95, gate="open", rules=2, explored=300, explored_wrong=1, served=50, audited=4, wrong=0, lost=3, upper=0.009,
    alarms=1,
)  # fmt: skip


def scraped(**sources):
    registry = CollectorRegistry()
    registry.register(CacheCollector(**sources))
    text = generate_latest(registry).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            samples[sample.name, *(value for _, value in sorted(sample.labels.items()))] = sample.value
    return samples


def everything():
    cache = VisualKVCache(max_entries=1, max_vram_bytes=100)
    for name in "aab":
        cache.get_or_compute(name, "image", lambda: np.ones((2, 4), np.float32))
    cache.store("big", "image", np.ones((100, 4)))
    cache.get_dp_mode_recommendation(2)
    totals = RequestTotals()
    for record in (
        Record(
            "1", method="exact", level="exact_text", prompt_tokens=10, reused_tokens=9, computed_tokens=1, ttft_ms=3
        ),
        Record("2", prompt_tokens=7, computed_tokens=7, encoder_runs=1, ttft_ms=40_000, latency_ms=50_000),
    ):
        totals.add(record)
    store = StoreStats(entries=2, bytes=50, hits=3, evictions={"bytes": 4}, refused={"full": 5})
    counts = CacheCounts(
        lookups=6,
        hits={"exact_text": 2},
        prefix_hits=1,
        rejections={"lexical": 3},
        promotions=1,
        unpromoted=4,
        rows_kept=50,
    )
    return cache, {
        "encoder": cache.stats,
        "stores": {"chunks": lambda: store},
        "levels": lambda: counts,
        "waiting": lambda: QueueCounts(labels=9, promotions=7, dropped=8),
        "trust": lambda: TRUST,
        "requests": totals,
        "stabilizer": lambda: StabilizeCounts(rules=Counter(tools=1)),
        "server": lambda: SimpleNamespace(outcomes={"served": 1}, waiting=2),
    }


def test_every_figure_of_the_encoder_cache_is_exported_with_its_value():
    cache, sources = everything()
    samples = scraped(**sources)
    table = re.findall(
        r"^\| `(\w+)` \| `(dejakv_\w+)(\{reason\})?` \|", (ROOT / "docs/reference/metrics.md").read_text(), re.M
    )
    stats = cache.get_cache_stats()
    assert {key for key, _, _ in table} == set(stats)
    for key, exported, by_reason in table:
        if by_reason:
            assert {reason: samples[exported, reason] for reason in stats[key]} == stats[key]
        else:
            assert samples[exported,] == stats[key]
    assert samples["dejakv_visual_cache_hits_total",] == 1
    assert samples["dejakv_visual_cache_evictions_total", "entries"] == 1
    assert samples["dejakv_visual_cache_refusals_total", "oversized"] == 1


def test_stores_levels_and_requests():
    _, sources = everything()
    samples = scraped(**sources)
    assert samples["dejakv_store_hits_total", "chunks"] == 3
    assert samples["dejakv_store_bytes", "chunks"] == 50
    assert samples["dejakv_store_evictions_total", "bytes", "chunks"] == 4
    assert samples["dejakv_level_hits_total", "exact_text"] == 2
    assert samples["dejakv_guard_rejections_total", "lexical"] == 3
    told = (
        "promotions_total",
        "promotions_failed_total",
        "promotions_waiting",
        "promotions_dropped_total",
        "rows_kept_total",
    )
    assert [samples[f"dejakv_{name}",] for name in told] == [1, 4, 7, 8, 50]
    assert samples["dejakv_requests_total", "exact_text", "exact"] == 1
    assert samples["dejakv_prompt_tokens_total",] == 17
    assert samples["dejakv_ttft_seconds_count",] == 2
    assert samples["dejakv_ttft_seconds_sum",] == pytest.approx(40.003)
    assert samples["dejakv_ttft_seconds_bucket", "0.005"] == 1
    assert samples["dejakv_ttft_seconds_bucket", "30.0"] == 1
    assert samples["dejakv_ttft_seconds_bucket", "+Inf"] == 2


def test_the_error_bound_is_exported_with_its_figures():
    samples = scraped(trust=lambda: TRUST, waiting=lambda: QueueCounts(labels=9))
    assert [samples[f"dejakv_trust_{name}",] for name in ("bound", "upper", "rules_open", "waiting")] == [
        0.01,
        0.009,
        2,
        9,
    ]
    counted = ("explored", "explored_wrong", "served", "audited", "wrong", "lost", "alarms")
    assert [samples[f"dejakv_trust_{name}_total",] for name in counted] == [300, 1, 50, 4, 0, 3, 1]


def test_while_nothing_is_served_there_is_no_upper_end_and_without_a_bound_nothing():
    closed = replace(TRUST, upper=None)
    assert ("dejakv_trust_upper",) not in scraped(trust=lambda: closed)
    assert scraped(trust=lambda: None) == {}


def test_documentation_and_dashboard_name_nothing_else_and_leave_nothing_out():
    _, sources = everything()
    exported = {name[0] for name in scraped(**sources)}
    histograms = {name.removesuffix("_bucket") for name in exported if name.endswith("_bucket")}
    documented = set(re.findall(r"`(dejakv_\w+?)(?:\{[\w,]+\})?`", (ROOT / "docs/reference/metrics.md").read_text()))
    plain = {name for name in exported if not any(name.startswith(f"{histogram}_") for histogram in histograms)}
    assert documented == plain | histograms
    dashboard = json.loads((ROOT / "docs/grafana/dejakv.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {name for target in targets for name in re.findall(r"dejakv_\w+", target["expr"])}
    assert used <= exported
    shown = {name.removesuffix("_bucket") for name in used}
    assert documented - shown == {"dejakv_visual_cache_hit_ratio"}, "the board computes it, over its own time"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for target in targets:
        assert target["expr"].count("(") == target["expr"].count(")")
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set(re.findall(r"\w+", target["expr"]))


def test_each_series_of_the_page_on_monitoring_exists_and_is_on_a_board():
    page = (ROOT / "docs/how-to/monitor.md").read_text()
    named = set(re.findall(r"`((?:vllm:)?dejakv_\w+?)(?:\{[\w,]+\})?`", page))
    assert {name.partition("_")[0] for name in named} == {"dejakv", "vllm:dejakv"}
    reference = (ROOT / "docs/reference/metrics.md").read_text()
    assert named <= set(re.findall(r"`((?:vllm:)?dejakv_\w+?)(?:\{[\w,]+\})?`", reference))
    for board, prefix in (("dejakv", "dejakv_"), ("dejakv-vllm", "vllm:dejakv_")):
        panels = json.loads((ROOT / f"docs/grafana/{board}.json").read_text())["panels"]
        expressions = " ".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
        shown = {name.removesuffix("_bucket") for name in re.findall(r"(?:vllm:)?dejakv_\w+", expressions)}
        assert {name for name in named if name.startswith(prefix)} <= shown
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(places)

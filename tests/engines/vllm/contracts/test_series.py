"""Every series of the connector exists with 0 before the first request, for each engine."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from dejakv.decide import bound
from dejakv.engines.vllm import scheduler, worker
from dejakv.engines.vllm.blend import blend
from dejakv.engines.vllm.connector import DejaKVConnector
from dejakv.engines.vllm.generations import RESET
from dejakv.engines.vllm.request import ConnectorCounts, short
from dejakv.engines.vllm.stats import KNOWN, METRICS
from dejakv.engines.vllm.transfers import loads, saves


@pytest.fixture
def prom():
    """The connector's Prometheus side, as vLLM makes it for a server of two engines."""
    engines = {0: ["docs", "0"], 1: ["docs", "1"]}
    types = {kind: kind for kind in (Counter, Gauge, Histogram)}
    for name in METRICS:  # of an engine that ran in this process before
        if (earlier := REGISTRY._names_to_collectors.get(f"vllm:dejakv_{name}")) is not None:
            REGISTRY.unregister(earlier)
    prom_metrics = DejaKVConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], engines
    )
    yield prom_metrics
    for counter in prom_metrics._counters.values():
        REGISTRY.unregister(counter)


def series():
    """Value of each series by its name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("vllm:dejakv_") and sample.name.endswith("_total")
    }


def test_every_series_begins_with_zero_for_each_engine(prom):
    values = series()
    assert set(values.values()) == {0}
    for engine in ("0", "1"):
        for name, (_, label) in METRICS.items():
            for value in map(short, KNOWN[name]) if label else [None]:
                assert (f"vllm:dejakv_{name}_total", "docs", engine, *([value] if value else [])) in values


def test_an_event_is_counted_in_the_series_that_was_there(prom):
    before = set(series())
    counts = ConnectorCounts()
    for reason in (saves.BACKLOG, saves.ENDED, worker.UNWANTED, "error: OSError: no space"):
        counts.add("saves_dropped", reason)
    counts.add("blends_refused", scheduler.NO_GAIN)
    prom.observe(counts.take(), 1)
    values = series()
    assert set(values) == before
    assert sum(values.values()) == 5


def test_reasons_in_the_code_are_known():
    """A constant that says why a save was dropped, a load failed or a blend was refused, and what a certificate says of a plan, have a
    series from the start."""
    dropped, withheld, failed = (
        {short(value) for value in KNOWN[name]} for name in ("saves_dropped", "withheld", "load_failures")
    )
    for module, known in ((saves, dropped), (worker, dropped), (loads, failed), (blend, failed)):
        reasons = [value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)]
        sentences = {short(reason) for reason in reasons if " " in reason}
        assert sentences
        assert sentences <= known
    for module in (loads, blend):
        assert not re.findall(r'problem = f?"[^{"]|return f?"the \w+ failed', inspect.getsource(module))
    assert "unlabelled answers" in map(short, KNOWN["blends_refused"])
    drops = re.findall(r"\.drop\(save\.name, (\S+?)\)", inspect.getsource(worker))
    assert drops
    assert not [each for each in drops if each.startswith(('"', "'"))], "a reason is a constant, so that it is known"
    source = inspect.getsource(bound)
    said = {short(f"{bound.CERTIFICATE} {each}") for each in re.findall(r'f"\{CERTIFICATE\} ([\w ]+):', source)}
    assert said == withheld


def test_the_alert_leaves_out_what_is_dropped_by_design():
    """The reasons in its rule are the code's, so that a changed sentence does not make it fire, or silent."""
    rules = yaml.safe_load((Path(__file__).parents[4] / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
    rule = next(rule["expr"] for rule in rules if rule["alert"] == "DejaKVSavesDropped")
    left_out = re.findall(r'reason!~"(.*?)"', rule)[0]
    by_design = {reason for reason in map(short, KNOWN["saves_dropped"]) if re.fullmatch(left_out, reason)}
    assert by_design == {short(reason) for reason in (worker.UNWANTED, RESET, saves.ENDED)}

"""Traces: real requests, OpenTelemetry's own SDK, and a receiver of OTLP over HTTP in this process."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import COSTS
from tests.otlp import Collector, attributes
from tests.serving import stored

from dejakv import tracing
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

SOURCE = Path(tracing.__file__).parent
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
VARIABLES = (
    "OTEL_SERVICE_NAME",
    "OTEL_TRACES_EXPORTER",
    "OTEL_SDK_DISABLED",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    *tracing.ENDPOINTS,
)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    with collector:
        yield collector
        tracing.stop()


def test_a_request_is_traced_from_the_clients_trace_to_the_load_of_state(
    collector: Collector, docs_engine: Any
) -> None:
    body = {"prompt": "Where is the key of the boat? It lies in the drawer of the desk.", "max_tokens": 2}
    with TestClient(create_app(ServerSettings(costs=COSTS), docs_engine)) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        stored(client)
        assert client.post("/v1/completions", json=body, headers=HEADERS).status_code == 200
        assert client.post("/v1/completions", json={"prompt": 7}).status_code == 400
        assert client.get("/health").status_code == 200

    # The server's end has sent what waited.
    assert collector.services == {"dejakv"}
    first = collector.named("dejakv.answer")
    assert attributes(first)["dejakv.method"] == "none"
    assert attributes(first)["dejakv.reason"]

    traced = collector.of_trace(TRACE)
    tree = {span.name: traced.parent_name(span) for span in traced.spans}
    route = "POST /v1/completions"
    assert tree == {
        route: "",
        "dejakv.queue": route,
        "dejakv.answer": route,
        "dejakv.lookup": "dejakv.answer",
        "dejakv.decision": "dejakv.answer",
        "dejakv.run": "dejakv.answer",
        "dejakv.load": "dejakv.run",
    }
    request = traced.named(route)
    assert request.parent_span_id.hex() == PARENT
    assert attributes(request)["gen_ai.request.max_tokens"] == 2
    assert attributes(request)["http.response.status_code"] == 200
    answer = attributes(traced.named("dejakv.answer"))
    assert (answer["dejakv.method"], answer["dejakv.provenance"]) == ("exact", "hit (text:exact)")
    assert answer["gen_ai.usage.cache_read.input_tokens"] == answer["gen_ai.usage.input_tokens"] - 1
    assert attributes(traced.named("dejakv.lookup"))["dejakv.status.exact_text"] == "hit"
    assert "dejakv.plans" in attributes(traced.named("dejakv.decision"))

    # Nothing of a prompt, whether it was answered or refused.
    assert "drawer" not in str(collector.spans)
    refused = [attributes(span) for span in collector.spans if span.name == route][-1]
    assert refused["http.response.status_code"] == 400


def test_the_middleware_before_vllm_continues_the_trace(collector: Collector) -> None:
    from tests.adopt.test_server_middleware import Application, answered

    assert answered(Application({"approximate": False}), {"prompt": "x"})[0] == 200
    tracing.stop()
    span = collector.named("POST /v1/completions")
    assert attributes(span)["gen_ai.operation.name"] == "text_completion"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "names 'zipkin'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "'http/json' is not known"),
        ({"OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_SDK_DISABLED": "TRUE"}, ""),
    ],
)
def test_what_stands_in_the_way_is_said_and_ends_nothing(
    variables: dict[str, str], words: str, collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not tracing.start()
    assert words in caplog.text
    assert bool(caplog.text) is bool(words)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert not tracing.start()
    assert "no traces are sent" in caplog.text
    assert "(extra otel)" in caplog.text


def test_opentelemetry_is_imported_once_traces_are_on_alone() -> None:
    importing = [file for file in SOURCE.rglob("*.py") if "opentelemetry" in file.read_text(encoding="utf-8")]
    assert importing == [SOURCE / "tracing.py"]
    at_import = [
        line for line in importing[0].read_text(encoding="utf-8").splitlines() if line.startswith(("import", "from"))
    ]
    assert not [line for line in at_import if "opentelemetry" in line]

    assert not tracing.is_on()
    with tracing.span("dejakv.answer") as span:
        assert span is None
    assert tracing.hand_over() is tracing.open_span("dejakv.request", {}) is None

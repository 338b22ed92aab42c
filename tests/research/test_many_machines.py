"""The parts of `research.many_machines` on a small scale, with the bundled model or none."""

import http.server
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from research.many_machines.chaos import Outcomes
from research.many_machines.orderings import gain
from research.many_machines.places import loads
from research.many_machines.proxy import CALM, Faults, Proxy
from research.many_machines.services import Services
from research.many_machines.simulation import Scale, extrapolated, simulated
from tests.services import S3Server, ValkeyServer, wait_until

from dejakv_models.docs import make_document

pytestmark = pytest.mark.slow  # with real services


@pytest.fixture
def services(bucket: str, s3_server: S3Server, valkey_server: ValkeyServer) -> Services:
    return Services(s3_server, valkey_server)


@pytest.fixture
def web() -> Iterator[http.server.ThreadingHTTPServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "4")
            self.end_headers()
            self.wfile.write(b"said")

        def log_message(self, *args: Any) -> None:
            pass

    asked: list[str] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = asked  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_proxy_does_what_it_is_told(web: Any) -> None:
    with closing(Proxy(web.server_port)) as proxy:

        def get(path: str, timeout: float = 30.0) -> bytes:
            with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/{path}", timeout=timeout) as answer:
                return answer.read()

        assert get("calm") == b"said"
        proxy.faults = Faults(delay=1.0, seconds=(0.0, 0.01))
        assert get("delayed") == b"said"
        proxy.faults = Faults(failed=1.0)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get("failed")
        proxy.faults = Faults(lost=1.0)
        with pytest.raises(OSError, match=r"closed|reset"):
            get("lost")
        proxy.faults = Faults(held=1.0)
        with pytest.raises(TimeoutError):
            get("held", 1.0)
        wait_until(lambda: proxy.done["held"] == 1, "the request")
        proxy.faults = CALM
        assert get("again") == b"said"
        assert proxy.done == {"delay": 1, "failed": 1, "lost": 1, "held": 1}
    assert set(web.asked) == {"/calm", "/delayed", "/lost", "/held", "/again"}


def test_answers_are_counted_as_wrong_or_none() -> None:
    told = Outcomes()
    told.add({"method": "exact", "token_ids": (1, 2)}, (1, 2), 0.5)
    told.add({"method": "exact", "token_ids": (1, 3)}, (1, 2), 0.1)
    told.add({"error": "StoreError: away"}, (1, 2), 0.1)
    told.add(None, (1, 2), 60.0)
    found = told.figures()
    assert (found["requests"], found["wrong"], found["unanswered"], found["slowest_s"]) == (4, 1, 2, 60.0)


def test_loads_are_beside_plain_reads(services: Services, tmp_path: Path) -> None:
    found = loads(services, tmp_path / "prefix", 2)
    assert found["s3_by_get"] == found["loads"]["s3"]["ratio"]["p50"]
    assert all(row["ms"] > 0 and row["plain_ms"] > 0 for row in found["loads"].values())


def test_orderings_blend_within_the_budget(services: Services, docs_engine: Any) -> None:
    rng = random.Random(0)
    texts = [make_document(rng, facts=16).text for _ in range(3)]
    found = gain(services, 4, docs_engine, texts)
    assert found["most_bytes_by_budget"] <= 1.0
    assert [quarter["requests"] for quarter in found["quarters"]] == [1, 1, 1, 1]
    assert any(quarter["blends"] for quarter in found["quarters"])


def test_one_cache_hits_more_than_its_parts(services: Services, tmp_path: Path) -> None:
    scale = Scale(segments=4000, replicas=4, own_segments=40)
    found = simulated(services, tmp_path, (100, 200), 400, scale)
    trace, bill = found["trace"], found["bucket"]
    assert trace["hit_rate"] > trace["hit_rate_apart"] > 0
    assert trace["segments_at_the_end"] <= scale.segments
    assert trace["a_request"]["read"] <= trace["a_request"]["found"]
    assert bill["dollars_a_month"]["heads"] < bill["dollars_for_heads_by_names"]
    told = {(row["kind"], row["tokens"]): row["in_feed"] for row in found["feed"]["told"]}
    assert told["segment", 8192]
    assert told["description", 256]
    assert not told["description", 8192]
    rows = [{"segments": 1024.0, "find_us": 10.0}, {"segments": 4096.0, "find_us": 14.0}]
    assert extrapolated(rows, "find_us", 16_384) == pytest.approx(18.0)

"""`dejakv verify` on a stub server: finds each of ten planted faults, has no false alarm, and says what it cannot tell."""

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from tests.services import Python, free_ports
from tests.verify.stub_server import ANSWERS, FAULTS, Stub, serve
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.errors import ConfigError, DejaKVError, InputError
from dejakv.verify import ClientSettings, VerifyResult, VerifySettings, verify_server
from dejakv.verify.client import ServerAnswer, read_answer
from dejakv.verify.noise import ServerNoise, binomial_tail, distance, spread
from dejakv.verify.page import to_json, to_markdown, verdict_line

RUNS = int(os.environ.get("DEJAKV_VERIFY_RUNS", "6"))
"""Runs on right servers; 200 were made by hand."""
RIGHT = [
    {},
    {"batch_noise": False},
    {"rounding": 0.0},
    {"rounding": 0.05},
    {"salt": False},
    {"salt": False, "counts": False},
    {"logprobs": False},
    {"tier": True, "capacity": 300},
]


def run(
    stub: Stub, rounds: int = 2, reference: Stub | None = None, seconds: float = 60, **settings: Any
) -> VerifyResult:
    def handler(request: httpx.Request) -> httpx.Response:
        return (reference or stub)(request) if request.url.host == "second" else stub(request)

    second = None if reference is None else ClientSettings("http://second")
    return verify_server(
        ClientSettings("http://stub", api_key=settings.pop("api_key", None)),
        VerifySettings(seconds=seconds, rounds=rounds, **settings),
        reference=second,
        transport=httpx.MockTransport(handler),
    )


def kinds(result: VerifyResult) -> set[str]:
    return {each.kind for each in result.wrong}


ROOM = {"stale": {"capacity": 4500}}
"""Blocks that the cache holds: state of before new weights must still be there to be wrong."""
SHOWN_BY = {
    "salt": {"salt"},
    "lora": {"lora"},
    "picture": {"picture"},
    "half_written": {"abort"},
    "tail": {"tail", "abort"},
    "off_by_one": {"repeat"},
    "truncated": {"repeat"},
    "scales": {"repeat"},
    "layers": {"repeat"},
    "stale": {"repeat"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_wrong_and_shown_by_its_kind(fault: str) -> None:
    result = run(Stub(fault=fault, **ROOM.get(fault, {})), rounds=3)
    assert result.wrong
    if fault in SHOWN_BY:
        assert SHOWN_BY[fault] & kinds(result)
    if fault in ("lora", "picture", "salt"):  # nothing else is touched by these
        assert kinds(result) <= {fault, "evicted"}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "salt"])
def test_a_fault_is_found_where_no_field_avoids_the_cache(fault: str) -> None:
    assert run(Stub(fault=fault, salt=False, counts=False, **ROOM.get(fault, {})), rounds=3).wrong


@pytest.mark.parametrize("fault", ["off_by_one", "truncated", "scales", "layers"])
def test_a_fault_of_a_tier_below_is_found_after_evictions(fault: str) -> None:
    result = run(Stub(fault=fault, tier=True, capacity=300), rounds=1)
    assert "evicted" in kinds(result)


@pytest.mark.parametrize("fault", ["lora", "tail", "half_written", "layers"])
def test_a_second_server_without_a_cache_shows_faults(fault: str) -> None:
    result = run(Stub(fault=fault, salt=False), rounds=3, reference=Stub(capacity=0))
    assert result.wrong
    assert "http://second" in result.fresh


@pytest.mark.parametrize("number", range(RUNS))
def test_a_right_server_has_no_wrong_answer(number: int) -> None:
    stub = Stub(**RIGHT[number % len(RIGHT)])
    result = run(stub, rounds=1 + number % 2)
    assert [(each.kind, each.distance, each.limit) for each in result.wrong] == []
    assert len(result.observations) > 40


def test_a_shared_salt_is_found_by_times_where_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of each thread's own that the server alone moves: a busy machine would make times of its own."""
    clock = threading.local()
    moved = SimpleNamespace(sleep=lambda seconds: setattr(clock, "now", getattr(clock, "now", 0.0) + seconds))
    monkeypatch.setattr("tests.verify.stub_server.time", moved)
    read = SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0), sleep=time.sleep)
    monkeypatch.setattr("dejakv.verify.client.time", read)
    result = run(Stub(fault="salt", counts=False, token_s=2e-4), rounds=0, seconds=1)
    assert kinds(result) == {"salt"}
    assert "seconds" in result.wrong[0].note
    assert not run(Stub(counts=False, token_s=2e-4), rounds=0, seconds=1).wrong


def test_a_server_that_does_not_tell_its_context_is_verified_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(_: Stub, body: dict[str, Any]) -> str:
        return "the prompt is too long" if len(str(body.get("prompt", "")).split()) > 200 else ""

    monkeypatch.setattr(Stub, "refusal", refusal)
    assert not run(Stub(), rounds=1).wrong
    assert run(Stub(fault="layers"), rounds=1).wrong


def test_requests_are_broken_off_where_streams_have_no_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(_: Stub, body: dict[str, Any]) -> str:
        return "leave out stream or logprobs" if body.get("stream") and body.get("logprobs") else ""

    monkeypatch.setattr(Stub, "refusal", refusal)
    assert "abort" in kinds(run(Stub(fault="half_written"), rounds=3))


def test_the_page_says_that_no_request_was_broken_off_where_streams_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stub, "refusal", lambda _, body: "no streams" if body.get("stream") else "")
    page = to_markdown(run(Stub(), rounds=1))
    assert "| abort | not tried: 400 no streams |" in page
    assert "refused requests that were to be broken off" in page


def test_the_longest_prompt_leaves_room_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(_: Stub, body: dict[str, Any]) -> str:
        words = len(str(body.get("prompt", "")).split())
        return "too long" if words + body.get("max_tokens", 0) > 324 else ""

    monkeypatch.setattr(Stub, "refusal", refusal)
    assert not any("refused a probe" in note for note in run(Stub(), rounds=1).notes)


def test_another_token_beside_the_same_log_probabilities_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    known, load, decode = threading.local(), Stub.load, Stub.decode

    def loaded(stub: Stub, keys: list[str]) -> np.ndarray:
        state = load(stub, keys)
        known.tokens = len(state)
        return state

    def decoded(stub: Stub, *of: Any) -> list[Any]:
        (token, tops), *others = decode(stub, *of)
        second = max((each for each in tops if each != token), key=tops.__getitem__)
        return [(second if known.tokens else token, tops), *others]

    monkeypatch.setattr(Stub, "load", loaded)
    monkeypatch.setattr(Stub, "decode", decoded)
    assert run(Stub(rounding=0.0), rounds=3).wrong


def test_a_shared_salt_is_found_in_a_short_context() -> None:
    assert kinds(run(Stub(fault="salt", context=300), rounds=0)) == {"salt"}


def test_a_shared_salt_is_found_where_state_is_stored_behind_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejakv.verify.run._STORING_S", 0.0)
    assert kinds(run(Stub(fault="salt", late=2), rounds=0)) == {"salt"}
    assert not run(Stub(late=2), rounds=0).wrong


def test_the_seed_of_an_earlier_run_sends_its_prompts_again() -> None:
    """State that was stored before new weights is compared with fresh answers."""
    stub = Stub(stale_after=10**9, capacity=10**6, counts=False)
    assert not run(stub, rounds=1, seed=5).wrong
    stub.fault, stub.stale_after = "stale", 0
    assert "repeat" in kinds(run(stub, rounds=1, seed=5))


def test_texts_alone_show_gross_faults_and_the_page_says_so() -> None:
    result = run(Stub(fault="layers", logprobs=False), rounds=2)
    assert result.wrong
    assert "no log probabilities" in to_markdown(result)


def test_the_page_has_the_verdict_and_commands_that_show_the_fault_again() -> None:
    result = run(Stub(fault="layers", key="secret"), rounds=1, api_key="secret")
    page, data = to_markdown(result), to_json(result)
    assert page.startswith("# Caches of base at http://stub\n\n**WRONG: ")
    assert "curl -s http://stub/v1/" in page
    assert "$DEJAKV_API_KEY" in page
    assert "secret" not in page
    assert "secret" not in json.dumps(data)
    assert data["verdict"] == "wrong"

    # Sent again to a new server with the fault, the first of them is wrong again.
    shown, stub = data["wrong"][0], Stub(fault="layers", rounding=0)
    with httpx.Client(base_url="http://stub", transport=httpx.MockTransport(stub)) as client:
        route = "/v1/completions" if "prompt" in shown["request"] else "/v1/chat/completions"
        for body in shown["before"]:
            client.post("/v1/completions" if "prompt" in body else "/v1/chat/completions", json=body)
        answer = read_answer(client.post(route, json=shown["request"]).json())
    expected = ServerAnswer(**{**shown["expected"], "likely": tuple(shown["expected"]["likely"])})
    assert distance(answer, expected) > shown["limit"]


def test_a_right_server_s_page_says_what_a_mix_up_would_move() -> None:
    page = to_markdown(run(Stub(pictures=False, tools=False), rounds=1))
    assert "No wrong answer" in page
    assert "| picture | not tried: 400 this is no multimodal model |" in page
    assert "| tools | not tried: 400 tools: not supported |" in page
    assert "of the tokens were cached (median)" in page


def test_a_server_without_a_cache_proves_nothing() -> None:
    assert verdict_line(run(Stub(capacity=0), rounds=1)).endswith("But no cache was seen at work.")


# Servers that make it hard.


@pytest.mark.parametrize(
    "settings",
    [{"stream_only": True}, {"completions": False}, {"tokens_a_word": 2}, {"context": 300}, {"sampled": True}],
    ids=str,
)
def test_a_server_of_another_kind_is_verified_too(settings: dict[str, Any]) -> None:
    result = run(Stub(**settings), rounds=1)
    assert not result.wrong
    assert run(Stub(fault="layers", **settings), rounds=1).wrong
    notes = " ".join(result.notes)
    assert ("Sampling is forced" in notes) == ("sampled" in settings)
    assert ("Lengths are in words" in notes) == ("tokens_a_word" in settings)


def test_limits_and_errors_in_between_are_waited_for_and_told() -> None:
    result = run(Stub(limit=9, errors=29), rounds=1)
    assert not result.wrong
    notes = " ".join(result.notes)
    assert "rate limits in" in notes
    assert "server errors in" in notes


def test_a_limit_that_does_not_end_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejakv.verify.client.MAX_WAIT_S", 0.1)
    with pytest.raises(InputError, match="limits the rate of requests"):
        run(Stub(limit=1))


@pytest.mark.parametrize(
    ("stub", "says"),
    [
        (Stub(key="secret"), "refuses the API key .*--api-key"),
        (Stub(sampled=True, logprobs=False), "sampling is forced.*nothing can be compared"),
        (Stub(errors=1), "did not answer, 4 times: 500 something broke"),
    ],
)
def test_a_server_that_allows_no_comparison_is_one_sentence(stub: Stub, says: str) -> None:
    with pytest.raises(InputError, match=says):
        run(stub)


def test_a_second_server_with_another_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="the same model with the same tokenizer"):
        run(Stub(), reference=Stub(tokens_a_word=2))


@pytest.mark.parametrize(
    ("url", "says"),
    [("localhost:1", "is no address"), ("http://127.0.0.1:9", "cannot be reached")],
)
def test_a_wrong_address_is_one_sentence(url: str, says: str) -> None:
    with pytest.raises(DejaKVError, match=says):
        verify_server(ClientSettings(url))


def test_a_page_that_is_no_api_is_one_sentence() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    with pytest.raises(InputError, match="does not answer in JSON"):
        verify_server(ClientSettings("http://stub"), transport=transport)


# The command, over real sockets.


@contextmanager
def served(stub: Stub, context: ssl.SSLContext | None = None) -> Iterator[str]:
    server = serve(stub, context)
    try:
        yield f"http{'s' if context else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(typer_app, ["verify", *arguments, "--seconds", "3"], standalone_mode=False)
    return (done.return_value if done.exception is None else 2), done.output + str(done.exception or "")


@pytest.mark.parametrize(("fault", "status"), [("", 0), ("layers", 1)])
def test_the_status_tells_whether_an_answer_is_wrong(fault: str, status: int, tmp_path: Path) -> None:
    page, numbers = tmp_path / "page.md", tmp_path / "numbers.json"
    with served(Stub(fault=fault)) as url:
        code, output = command(url, "--output", str(page), "--json", str(numbers))
    assert code == status, output
    assert verdict_of(page) in output
    assert json.loads(numbers.read_text())["url"] == url


def verdict_of(page: Path) -> str:
    return page.read_text().split("**")[1]


@pytest.mark.slow
def test_dejakv_serve_is_verified_by_its_log_probabilities() -> None:
    """The bundled model answers random words alike: what a mix-up would move shows in the log probabilities alone."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    process = Python("-m", "dejakv", "serve", "--model", "docs-lm", "--port", str(port))
    try:
        while process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.2)
        result = verify_server(ClientSettings(url), VerifySettings(seconds=20, workers=2, rounds=1))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert not result.wrong
    assert "`dejakv`" in result.fresh
    assert "repeat" in {each.kind for each in result.observations}
    assert sum(count for count, _ in result.cached) > 0
    page = to_markdown(result)
    assert "no log probabilities" not in page
    assert f"more than {result.observations[0].limit:.3f} is wrong" in page
    assert max(result.signals["tail"]) > result.observations[0].limit


def test_a_model_that_answers_all_probes_alike_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "logits", lambda *_: np.arange(len(ANSWERS), dtype=float))
    result = run(Stub(), rounds=1)
    assert verdict_line(result).endswith("the model answers all probes alike.")
    assert "A mix-up would not show in" in to_markdown(result)


def test_an_own_authority_is_given_with_ca_file(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    line = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*line.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with served(Stub(), context) as url:
        assert "--ca-file" in command(url)[1]
        assert command(url, "--ca-file", str(certificate))[0] == 0
    assert "cannot be read" in command(url, "--ca-file", str(tmp_path / "none.pem"))[1]


def test_the_package_needs_no_torch() -> None:
    code = "import sys, dejakv.verify, dejakv.cli.verify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Distances.


def test_distance_ends_behind_the_first_token_that_differs() -> None:
    first = ServerAnswer("a b", ("a", "b"), ({"a": -0.1, "c": -3.0}, {"b": -0.2}))
    second = ServerAnswer("c d", ("c", "d"), ({"a": -0.9, "c": -0.7}, {"d": -9.0}))
    assert distance(first, second) == pytest.approx((0.8 + 2.3) / 2)
    assert distance(first, first) == 0


def test_distance_counts_a_token_that_a_side_does_not_list_with_the_least() -> None:
    first = ServerAnswer("a", ("a",), ({"a": -0.1, "b": -3.0},))
    second = ServerAnswer("a", ("a",), ({"a": -0.1, "c": -2.0},))
    assert distance(first, second) == pytest.approx((0 + 0 + 1.0) / 3)


def test_limits_follow_the_noise() -> None:
    assert ServerNoise((0.0,), (0.02,)).limit == pytest.approx(0.08)
    assert ServerNoise((0.0,), (1e-5,)).limit == 0.005
    assert ServerNoise((0.0,), (0.0,), repeated=(0.01, 0.015, 0.02)).limit == pytest.approx(0.06)
    assert ServerNoise((0.0,), (0.0,), repeated=(0.3,)).limit == 0.1
    assert ServerNoise((0.0,), (0.0,)).limit == 0.02
    assert ServerNoise((0.0,), (0.0,), cached=True).limit == 0.005
    assert spread([]) == 0
    assert binomial_tail(1, 3, 0.5) == pytest.approx(0.875)


def test_threads_are_ended() -> None:
    before = threading.active_count()
    run(Stub(), rounds=1)
    assert threading.active_count() <= before

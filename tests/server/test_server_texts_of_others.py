"""No response, header, figure, message or log line holds text of a prompt but the caller's own: donors have a marker in them."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import ADOPT, request
from tests.serving import stored

from dejakv.decide.guards.base import Guard, GuardVerdict, ThresholdGuard
from dejakv.decide.levels.base import LevelSearch, Match, Query
from dejakv.pipeline import Pipeline
from dejakv.records import Record
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings

MARK, NUMBER = "zanzibar", "778899"
PAIRS = {
    "negations differ": (f"is {MARK} not {NUMBER}?", "is bob red?"),
    "numbers differ": (f"where do {NUMBER} of {MARK} live?", "where do 12 of bob live?"),
    "kinds of question differ": (f"how {MARK} is the box?", "how wide is the box?"),
    "attributes asked for differ": (f"what color is {MARK}?", "what size is bob?"),
    "content words differ": (f"where does {MARK} live?", "where does bob live?"),
    "the order of": (f"does {MARK} like ann and bob?", f"does ann like {MARK} and bob?"),
    "verbs differ": (f"was {MARK} there?", f"is {MARK} there?"),
}
"""What is said: a donor, and a question that its text must not answer."""


def clean(reason: str, *others: str) -> None:
    assert 0 < len(reason) <= 200, reason
    for said in (reason, *others):
        assert MARK not in said.lower(), said
        assert NUMBER not in said


PLAIN = replace(ADOPT, semantic_text=False, exact_text=False, lexical_guard=False)


class Like:
    """A level to which every prompt is like the first; `fails`: it raises with that prompt's text."""

    name = "semantic_text"
    status_names = ("semantic_text",)

    def __init__(self, fails: bool = False) -> None:
        self.donors: list[tuple[str, str]] = []
        self.fails = fails

    def search(self, query: Query) -> LevelSearch:
        if self.fails and self.donors:
            raise ValueError(f"cannot compare {self.donors[0][1]}")
        return LevelSearch(tuple(Match(donor, self.name, 0.95) for donor, _ in self.donors), {self.name: "hit"})

    def vector(self, text: str, partition: str | None = None) -> Any:
        return None

    def add(self, donor: str, query: Query) -> None:
        self.donors.append((donor, query.text))

    def remove(self, donor: str) -> None:
        self.donors.clear()

    def __len__(self) -> int:
        return len(self.donors)


class Broken(Guard):
    """A guard that raises with the donor's text."""

    name = "broken"

    def judge(self, request: Any, donor: Any, match: Match) -> GuardVerdict:
        raise ValueError(f"what is {donor.prompt}")


class Talkative(Broken):
    """One that tells a story."""

    def judge(self, request: Any, donor: Any, match: Match) -> GuardVerdict:
        return GuardVerdict("reject", self.name, "no\nno " * 1000)


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO)
    yield caplog
    assert MARK not in caplog.text.lower()
    assert NUMBER not in caplog.text


def refused(pipeline: Pipeline, donor: str, asked: str, **more: Any) -> Record:
    """The record of a question after a donor was stored."""
    pipeline.answer(request(donor))
    record = pipeline.answer(request(asked, **more)).record
    assert not record.approximate, record
    clean(record.reason, record.plans, record.provenance, str(dict(record.statuses)))
    return record


@pytest.mark.parametrize("says", PAIRS)
def test_words(served: Any, says: str) -> None:
    pipeline = served(replace(ADOPT, similarity_threshold=-1.0))
    assert refused(pipeline, *PAIRS[says]).reason.startswith(f"lexical: {says}")


@pytest.mark.parametrize(
    ("says", "changed", "made"),
    [
        ("threshold: score", {}, {"guards": [ThresholdGuard({"semantic_text": 0.99})]}),
        ("broken: the guard failed: ValueError", {}, {"guards": [Broken()]}),
        ("broken: no no no", {}, {"guards": [Talkative()]}),
        ("semantic_text: the level failed: ValueError", {}, {"levels": [Like(fails=True)]}),
        ("chain: all guards abstained", {}, {"guards": [ThresholdGuard()]}),
        ("not asked for", {"reuse": "exact"}, {}),
        ("min_gain", {"min_gain": 10_000}, {}),
        ("min_gain", {"reuse": "blend", "blend_share": 0.95, "copied_text": False, "exact_prefix": False}, {}),
        ("costs", {"costs": (1e-9, 0.0, 1e3, 1e3), "reuse": "blend", "copied_text": False}, {}),
    ],
)
def test_all_else(served: Any, says: str, changed: dict[str, Any], made: dict[str, Any]) -> None:
    with_levels = {"levels": [Like()], "guards": [ThresholdGuard({"semantic_text": 0.5})], **made}
    pipeline = served(replace(PLAIN, **changed), **with_levels)
    assert refused(pipeline, *PAIRS["content words differ"]).reason.startswith(says)


def test_the_surroundings_of_the_compared_text(served: Any) -> None:
    pipeline = served(PLAIN, levels=[Like()], guards=[ThresholdGuard({"semantic_text": 0.5})])
    pipeline.answer(request("where does bob live?", f"{MARK} lives in {NUMBER}."))
    record = pipeline.answer(request("where does bob live?", "bob lives in rome.")).record
    assert not record.approximate
    clean(record.reason)


@pytest.mark.parametrize(("says", "reuse"), list(zip(PAIRS, cycle(("exact", "adopt", "blend")))))
def test_through_the_server(docs_engine: Any, says: str, reuse: Any) -> None:
    """Every endpoint and answer; callers without keys share a partition."""
    settings = ServerSettings(reuse=reuse, max_new_tokens=64)
    context = f"<s> {'ann lives in paris. bob lives in rome. cleo works as a baker. ' * 4}<q> "
    donor, asked = (f"{context}{text} <a>" for text in PAIRS[says])
    with TestClient(create_app(settings, docs_engine)) as client:
        plain = {"max_tokens": 2, "temperature": 0}
        client.post("/v1/generate", json={"prompt": donor, "max_new_tokens": 2, "temperature": 0})
        stored(client)
        wish = {"dejakv": {"reuse": reuse}}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/generate", {"prompt": asked, "max_new_tokens": 2, "temperature": 0}),
            (
                "/v1/generate",
                {"prompt": f"{asked} .", "max_new_tokens": 2, "use_semshare": True, "sim_threshold": 0.99},
            ),
            ("/v1/completions", {"prompt": f"{asked} ?", **plain, **wish}),
            ("/v1/completions", {"prompt": f"{asked} !", **plain, **wish, "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": asked}], **plain, **wish}),
            ("/v1/completions", {"prompt": asked, "max_tokens": 10**6}),
            ("/v1/completions", {"prompt": asked, "temperature": -1}),
            ("/v1/generate", {"prompt": asked, "store_key": "?"}),
        ]
        answers = [client.post(path, json=body) for path, body in bodies]
        answers += [client.get(path) for path in ("/metrics", "/v1/cache/stats", "/", "/v1/models", "/health")]
        said = "".join(f"{answer.text} {dict(answer.headers)}" for answer in answers)
        if MARK not in asked:  # else it is the caller's own
            assert MARK not in said.lower()
            assert NUMBER not in said
        reasons = [answers[0].json()["reason"], answers[2].json()["dejakv"]["reason"]]
        for reason in filter(None, reasons):
            clean(reason)
        if reuse == "exact":
            assert reasons[0].startswith("lexical: "), reasons

"""The error bound of the front: what is drawn, what the requests of a label are, and what becomes of them."""

import asyncio
import json
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
from fronts import WOULD, Front, config, taught
from test_vllm_adopt import FIRST, NEAR
from tests.bounded import says

from dejakv.engines.vllm.adopt import Adopter
from dejakv.engines.vllm.front_bound import FrontBound
from dejakv.engines.vllm.label_requests import LOWEST, seen_of
from dejakv.engines.vllm.limits import Limit
from dejakv.engines.vllm.middleware import AdoptMiddleware
from dejakv.engines.vllm.openai_body import own
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.errors import ConfigError


def test_adopting_is_drawn_for_and_labelled_by_two_requests() -> None:
    async def run() -> None:
        front = Front(differs=says(repeat(False)))
        front.pilot("adopt", **front.of_adopt())
        await taught(front)
        told = await front.post({"prompt": NEAR, "stream": True, "temperature": 1, "seed": 3, "max_tokens": 7})
        assert told["x-dejakv-method"] == "none"
        assert told["x-dejakv-reason"].startswith("error bound: gate closed")
        await front.labelled()
        *_, full, reused = front.behind.bodies
        assert (full["prompt"], reused["prompt"]) == (NEAR, FIRST)
        for body in (full, reused):
            assert body["temperature"] == 0
            assert body["return_token_ids"] is True
            assert body["max_tokens"] == 7
            assert body["kv_transfer_params"] == {"dejakv": {"mode": "off"}}
            assert not {"stream", "seed", "priority"} & set(body)
        sent = dict(front.behind.scopes[-1]["headers"])
        assert sent[b"authorization"] == b"Bearer one"
        assert b"x-request-id" not in sent
        report = front.bound.gate.report(front.partition)
        assert (report.explored, report.explored_wrong, report.gate) == (1, 0, "open")

        told = await front.post({"prompt": NEAR.replace("the capital", "a capital")})
        assert told["x-dejakv-method"] == "adopt"
        await front.labelled()
        assert front.bound.gate.report(front.partition).audited == 1
        served, full, reused = (body["prompt"] for body in front.behind.bodies[-3:])
        assert full == NEAR.replace("the capital", "a capital")
        assert served == reused != full

    asyncio.run(run())


def test_first_tokens_are_compared_with_one_token_each() -> None:
    async def run() -> None:
        front = Front(differs="first")
        front.pilot("adopt", **front.of_adopt())
        await taught(front)
        await front.post({"prompt": NEAR, "max_tokens": 7, "max_completion_tokens": 9, "min_tokens": 4})
        await front.labelled()
        body = front.behind.bodies[-1]
        assert body["max_tokens"] == 1
        assert not {"min_tokens", "max_completion_tokens"} & set(body)
        assert front.bound.gate.report(front.partition).explored_wrong == 1, "the answers have numbers"

    asyncio.run(run())


def test_a_blend_is_limited_and_labelled_from_what_the_connector_says() -> None:
    async def run() -> None:
        front = Front("blend", differs=says(repeat(False)))
        front.behind.would = WOULD
        front.pilot("blend", partition=front.partition, epoch="e", setting="s")
        prompt = {"prompt": "some text", "max_tokens": 3}
        await front.post(prompt)
        assert front.behind.bodies[0]["kv_transfer_params"]["dejakv"] == {
            "mode": "blend",
            "limit": {"risk": -1.0, "epoch": "", "setting": ""},
        }
        await front.labelled()
        *_, full, reused = front.behind.bodies
        assert full["kv_transfer_params"] == {"dejakv": {"mode": "off"}}
        assert reused["kv_transfer_params"]["dejakv"] == {
            "mode": "blend",
            "donors": WOULD["donors"],
            "apart": front.partition,
        }
        assert full["cache_salt"] == front.partition
        assert reused["cache_salt"].startswith(f"{front.partition}-")
        assert front.bound.gate.report(front.partition).explored == 1

        await front.post(prompt)
        assert front.behind.bodies[3]["kv_transfer_params"]["dejakv"]["limit"] == {
            "risk": 1.0,
            "epoch": "e",
            "setting": "s",
        }
        await front.labelled()
        report = front.bound.gate.report(front.partition)
        assert (report.served, report.audited, report.lost) == (1, 1, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": "x", "stream": True}, "a stream does not tell"),
        ({"prompt": ["x", "y"]}, "several prompts"),
        ({"prompt": "x", "kv_transfer_params": {"dejakv": {"mode": "blend", "no_store": True}}}, "nothing of this"),
    ],
)
def test_what_cannot_be_labelled_is_run_exactly(body: dict[str, Any], why: str) -> None:
    async def run() -> None:
        front = Front("blend")
        told = await front.post(body)
        assert told["x-dejakv-reason"].startswith(why)
        assert front.behind.bodies[0]["kv_transfer_params"]["dejakv"]["mode"] == "exact"

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/responses", "/inference/v1/generate", "/v1/chat/completions"])
def test_no_other_way_leads_to_a_blend(path: str) -> None:
    async def run() -> None:
        front = Front("off")
        wish = {"kv_transfer_params": {"dejakv": {"mode": "blend"}}}
        nested = {"vllm_xargs": wish, "sampling_params": {"extra_args": wish}, "messages": [{"role": "user", **wish}]}
        await front.post({**nested, **({} if "chat" in path else wish)}, path)
        assert '"blend"' not in json.dumps(front.behind.bodies[0])

    asyncio.run(run())


def test_without_a_bound_a_front_may_ask_for_blends() -> None:
    async def run() -> None:
        front = Front("blend")
        front.app.bound = None
        await front.post({"prompt": "x"})
        await front.post({"prompt": "x", "kv_transfer_params": {"dejakv": {"mode": "blend", "donors": ["d"]}}})
        wishes = [body["kv_transfer_params"]["dejakv"] for body in front.behind.bodies]
        assert wishes == [{"mode": "blend"}, {"mode": "blend", "donors": ["d"]}]

    asyncio.run(run())


def test_clients_cannot_ask_for_what_the_front_asks() -> None:
    wish = {"mode": "blend", "donors": ["d"], "apart": "key-of-another", "limit": {"risk": 1.0}}
    body = {
        "prompt": "x",
        "kv_transfer_params": {"dejakv": wish},
        "vllm_xargs": {"kv_transfer_params": {"dejakv": wish}},
    }
    own(body, "key-mine")
    left = {"mode": "blend", "donors": ["d"]}
    assert body["kv_transfer_params"] == {"dejakv": left}
    assert body["vllm_xargs"] == {"kv_transfer_params": {"dejakv": left}}


def test_a_label_is_lost_where_vllm_refuses_the_request_and_wrong_where_it_refuses_the_label() -> None:
    async def run() -> None:
        front = Front(differs=says(repeat(False)))
        front.pilot("adopt", **front.of_adopt())
        await taught(front)
        front.behind.status = 400
        await front.post({"prompt": NEAR})
        await front.labelled()
        assert front.bound.gate.report(front.partition).lost == 1
        front.behind.status = 200
        front.behind.hold = asyncio.Event()
        await front.post({"prompt": NEAR})
        await asyncio.sleep(0)
        front.behind.status = 503
        front.behind.hold.set()
        await front.labelled()
        report = front.bound.gate.report(front.partition)
        assert (report.explored, report.explored_wrong) == (1, 1)

    asyncio.run(run())


def test_a_shutdown_loses_what_waits_and_counts_what_runs_as_wrong() -> None:
    async def run() -> None:
        front = Front(differs=says(repeat(False)))
        front.pilot("adopt", **front.of_adopt())
        await taught(front)
        front.behind.hold = asyncio.Event()
        front.behind.reached.clear()
        await front.post({"prompt": NEAR})
        front.behind.reached.clear()
        await front.behind.reached.wait()
        front.bound.begin()  # a client's request that never ends
        await front.post({"prompt": NEAR.replace("the capital", "a capital")})
        messages = iter([{"type": "lifespan.shutdown"}])

        async def receive() -> Any:
            return next(messages)

        await front.app({"type": "lifespan"}, receive, None)
        report = front.bound.gate.report(front.partition)
        assert (report.explored, report.explored_wrong, report.lost) == (1, 1, 1)
        assert not len(front.bound.audits)

    asyncio.run(run())


def test_labels_wait_while_a_client_is_served_and_have_the_lowest_priority() -> None:
    async def run() -> None:
        from dejakv.engines.vllm.front_facts import Served

        front = Front(differs=says(repeat(False)))
        front.bound.served = Served("known", priority=True)
        front.pilot("adopt", **front.of_adopt())
        await taught(front)
        front.bound.begin()
        await front.post({"prompt": NEAR})
        assert front.bound._labelling is None
        front.bound.end(front.behind)
        await front.labelled()
        assert [body.get("priority") for body in front.behind.bodies] == [None, None, LOWEST, LOWEST]

    asyncio.run(run())


def test_the_operator_is_told_and_a_client_is_not() -> None:
    async def run() -> None:
        front = Front()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/dejakv/trust"}
        await front.app({**scope, "headers": [(b"authorization", b"Bearer one")]}, None, send)
        assert sent[0]["status"] == 403
        front.app.operator = type(front.app.keys)(["operator"])
        await front.app({**scope, "headers": [(b"authorization", b"Bearer operator")]}, None, send)
        assert sent[2]["status"] == 200
        told = json.loads(sent[3]["body"])
        assert (told["delta"], told["gate"], told["waiting"]) == (0.9, "closed", 0)

    asyncio.run(run())


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="an adopter alone sends none"):
        Adopter(config())
    with pytest.raises(ConfigError, match="responses have none"):
        FrontBound(config(differs="kl:0.1"))
    with pytest.raises(ConfigError, match="a connector can send none: give it to the front"):
        ConnectorSettings.from_extra({"error_bound": 0.1})
    monkeypatch.setenv("DEJAKV_ADOPT", '{"error_bound": 0.01, "semantic_text": false}')
    assert AdoptMiddleware(None).bound is not None


def test_a_connector_that_blends_unasked_is_refused_at_the_start() -> None:
    """Routes that carry no wish would be blended, and nobody would bound it."""

    async def run() -> None:
        front = Front()
        transfer = SimpleNamespace(kv_connector="DejaKVConnector", kv_connector_extra_config={"mode": "blend"})
        state = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))

        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        with pytest.raises(ConfigError, match="give the connector mode exact"):
            await front.app({"type": "lifespan", "app": SimpleNamespace(state=state)}, receive, None)

    asyncio.run(run())


def test_wishes_of_the_front() -> None:
    settings = ConnectorSettings(modes=("exact", "blend"))

    def wish(**given: Any) -> Wish:
        return Wish.of({"dejakv": {"mode": "blend", **given}}, settings)

    assert wish(limit={"risk": 0.5, "epoch": "e", "setting": "s"}).limit == Limit(0.5, "e", "s")
    for risk in ("1", float("nan"), -(10**400)):
        assert wish(limit={"risk": risk, "epoch": "e", "setting": "s"}).problem.startswith("limit has no")
    for broken in ({}, 1):
        assert wish(limit=broken).problem.startswith("limit has no")
    assert wish(donors=["d"], apart="salt").no_store, "nothing is kept of it"
    assert wish(apart="salt").problem.startswith("apart is for")


def test_answers_are_read_as_they_are_compared() -> None:
    call = {"id": "random", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"choices": [{"message": {"content": None, "tool_calls": [call]}, "token_ids": [1, 2]}]}
    other = {"choices": [{"message": {"content": None, "tool_calls": [{**call, "id": "other"}]}, "token_ids": [1, 2]}]}
    assert seen_of(answer).text == seen_of(other).text
    assert seen_of(answer).token_ids == (1, 2)

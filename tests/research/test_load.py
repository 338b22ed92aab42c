"""The benchmark of vLLM under load: arrivals, prompts, figures and the page from kept rows; no server runs."""

import asyncio
import itertools
import json
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from research.load import page
from research.load.__main__ import Kept, measure_load
from research.load.client import Answer, arrivals, ask
from research.load.figures import ALL_AT_ONCE, ARMS, capacity, figures
from research.load.phases import Settings, loaded, turned
from research.load.server import VLLMServer
from research.load.stream import mixed, phases

from dejakv.errors import ConfigError, DejaKVError


def test_arrivals_are_poisson_by_seed() -> None:
    assert arrivals(5, None, "a") == [0.0] * 5
    due = arrivals(4_000, 2.0, "a")
    gaps = [after - before for before, after in itertools.pairwise(due)]
    assert due == arrivals(4_000, 2.0, "a") != arrivals(4_000, 2.0, "b")
    assert 0 < due[0] < due[-1] < 4_000 / 2.0
    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.01)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.1)  # an exponential one's equals its mean


def test_each_arm_goes_first_in_turn() -> None:
    assert [turned(number)[0] for number in range(3)] == list(ARMS)
    assert all(sorted(turned(number)) == sorted(ARMS) for number in range(4))


def test_blendable_prompts_have_text_of_earlier_phases() -> None:
    def text(start: int, count: int) -> tuple[int, ...]:
        return tuple(range(start, start + count))

    first, other = text(0, 200), text(1_000, 200)
    moved = text(5_000, 8) + text(40, 120) + text(6_000, 8)
    within = text(7_000, 8) + text(5_000, 8) + text(8_000, 200)  # repeats too little of its own phase
    _, later = phases([first, other, moved, within], 2, 2)
    assert [prompt.blendable for prompt in later] == [True, False]
    again = phases([first, other, first[:150], other], 2, 2)[1]
    assert [(prompt.prefix, prompt.blendable) for prompt in again] == [(150, False), (200, False)]  # prefixes are exact


def test_strangers_share_nothing_and_have_the_same_lengths() -> None:
    phase = phases([tuple(range(start, start + 300)) for start in (0, 1_000, 2_000)], 1, 2)[1]
    every = mixed(phase, "a")
    strangers = [prompt.ids for prompt in every if prompt.stranger]
    assert sorted(map(len, strangers)) == sorted(len(prompt.ids) for prompt in phase)
    assert every == mixed(phase, "a") != mixed(phase, "b")
    runs = {ids[at : at + 4] for ids in strangers for at in range(len(ids) - 3)}
    assert not runs & {prompt.ids[at : at + 4] for prompt in phase for at in range(len(prompt.ids) - 3)}


EVENTS = [
    {"choices": [{"token_ids": [7]}]},
    {"choices": [{"token_ids": [8, 9]}]},
    {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 4}}},
]


def answered(*events: dict[str, Any], status: int = 200, broken: bool = False) -> Answer:
    """The client's answer to a stream of events, or to one that breaks off."""

    async def stream() -> Any:
        for event in events:
            yield f"data: {json.dumps(event)}\n\n".encode()
        if broken:
            raise httpx.ReadError("reset")

    async def asked() -> Answer:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, content=stream()))
        async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
            return await ask(client, [1, 2], "salt", 3)

    return asyncio.run(asked())


def test_only_a_whole_answer_has_no_error() -> None:
    whole = answered(*EVENTS)
    assert (whole.ids, len(whole.times), whole.cached, whole.error) == ([7, 8, 9], 2, 4, "")
    assert "after 1 tokens of 3" in answered(EVENTS[0], EVENTS[2]).error
    assert "boom" in answered(EVENTS[0], {"error": {"message": "boom"}}).error
    assert "503" in answered(*EVENTS, status=503).error
    assert "reset" in answered(*EVENTS, broken=True).error


def test_no_process_of_a_server_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "python"
    command.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/worker\nwait\n")
    command.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(command))
    monkeypatch.setattr("research.load.server.resolve", lambda name: tmp_path)
    worker = tmp_path / "worker"
    with suppress(KeyboardInterrupt), VLLMServer("prefix", tmp_path, 1):
        while not worker.exists() or not worker.read_text().endswith("\n"):
            time.sleep(0.01)
        raise KeyboardInterrupt
    state = Path(f"/proc/{worker.read_text().strip()}/stat")
    for _ in range(6_000):  # its end is not waited for: it is no child of this process
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("the worker runs on")


class Idle:
    """A server that has nothing to do."""

    def __init__(self, arm: str) -> None:
        self.url, self.settled = arm, 0

    def settle(self) -> None:
        self.settled += 1

    def counters(self) -> dict[str, float]:
        return {"saves": float(self.settled), "hits": 1.0}


def test_arms_get_the_same_prompts_at_the_same_times(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int, list[float]]] = []
    failing = {"": ""}

    async def play(url: str, prompts: list[tuple[int, ...]], due: list[float], salt: str, length: int) -> list[Answer]:
        sent.append((url, hash(tuple(prompts)), due))
        took = 2.0 if url == "prefix" else 1.0
        return [Answer(at, [0.5, took], [7, 8], 0, failing.get(url, "")) for at in due]

    monkeypatch.setattr("research.load.phases.play", play)
    monkeypatch.setattr(
        "research.load.phases.prompts_of", lambda _, count: [tuple(range(n, n + 50)) for n in range(count)]
    )
    servers: Any = {arm: Idle(arm) for arm in ARMS}
    settings = Settings(workloads=("mix",), loads=(50, 95), requests=8, warm=2, rounds=1, kv_gib=1)
    rows = list(loaded(servers, settings, "mix", 0, None))
    assert [(one["load"], one["arm"]) for one in rows] == [
        *(("50", arm) for arm in turned(0)), *(("95", arm) for arm in turned(1)), *((ALL_AT_ONCE, arm) for arm in turned(2)),
    ]  # fmt: skip
    phases_sent = [sent[at : at + 3] for at in range(0, len(sent), 3)]
    assert [len({(prompts, *due) for _, prompts, due in some}) for some in phases_sent] == [1, 1, 1, 1]
    assert [{arm for arm, *_ in some} for some in phases_sent] == [set(ARMS)] * 4
    assert [one["rate"] for one in rows[::3]] == [0.5, 0.95, None]  # the 2 requests before took 2 seconds
    assert all(
        server.settled == len(sent) for server in servers.values()
    )  # nobody writes while another one is measured
    assert [one["rate"] for one in loaded(servers, settings, "mix", 1, None)][::3] == [0.5, 0.95, None]
    assert [one["rate"] for one in loaded(servers, settings, "mix", 1, 3.0)][::3] == [1.5, pytest.approx(2.85), None]
    failing["prefix"] = "status 500"
    with pytest.raises(DejaKVError, match="prefix failed 2 of the 2 requests before: status 500"):
        next(loaded(servers, settings, "mix", 2, None))


def request(first: float, token: int = 7, **more: Any) -> dict[str, Any]:
    given = {"due": 1.0, "times": [first, first + 0.1], "ids": [token, 8], "cached": 0, "error": ""}
    return {"tokens": 800, "prefix": 16, "blendable": True, "stranger": False, **given, **more}


def row(load: str, arm: str, requests: list[dict[str, Any]], **counters: int) -> dict[str, Any]:
    return {
        "workload": "rag", "round": 0, "load": load, "arm": arm, "rate": None,
        "counters": {name.replace("__", ": "): value for name, value in counters.items()}, "requests": requests,
    }  # fmt: skip


CELL = [
    row("80", "prefix", [request(2.0), request(4.0)]),
    row("80", "exact", [request(2.0), request(4.0, cached=16)]),
    row("80", "blend", [request(1.0, cached=600), request(2.0, token=9, cached=16)], **{"load_failures__the load": 1}),
]
ROWS = [*CELL, *({**one, "load": ALL_AT_ONCE} for one in CELL)]

TOLD = {
    "command": "python -m research.load", "finished": "2026-01-01T00:00:00", "versions": {"vllm": "0.32.0"},
    "machine": {"cpu": "a CPU", "cores": 2, "cores_used": 2, "load_average": 0.5},
    "settings": {"flags": ["--dtype", "float32"], "kv_gib": 3, "warm": 8, "requests": 2},
}  # fmt: skip


def test_every_request_counts() -> None:
    cell = figures(ROWS)["rag"]["80"]
    assert cell["first_tokens_equal"] == {"exact": 1.0, "blend": 0.5}
    assert (cell["blendable"], cell["blended"], cell["refused"]) == (2, 0.5, 0.5)
    assert cell["ttft_p95_by_prefix"]["blend"] == pytest.approx(0.5)
    assert cell["ttft_p50_by_prefix"]["exact"] == pytest.approx(1.0)
    assert cell["itl_p99_by_prefix"]["blend"] == pytest.approx(1.0)
    assert cell["loads_thrown_away"] == {"exact": 0, "blend": 1}
    assert capacity(CELL[0]) == pytest.approx(2 / 5.1)
    assert cell["capacity_by_prefix"]["blend"] == pytest.approx(5.1 / 3.1)


def test_an_arm_that_fails_a_request_has_no_figure() -> None:
    failing = [*CELL[:2], row("80", "blend", [request(1.0), request(0.1, times=[0.1], ids=[7], error="status 500")])]
    cells = figures([*failing, *ROWS[3:]])["rag"]
    assert cells["80"]["failed"] == {"prefix": 0, "exact": 0, "blend": 1}
    assert cells["80"]["errors"] == {"blend": ["status 500"]}
    for name in ("ttft_p50", "ttft_p95", "itl_p99"):
        assert list(cells["80"][f"{name}_by_prefix"]) == ["exact"]
    assert list(cells["80"]["first_tokens_equal"]) == ["exact"]
    assert (cells["80"]["blended"], cells["80"]["refused"]) == (None, None)
    assert list(cells["80"]["capacity_by_prefix"]) == ["exact", "blend"]  # of the phase at once, in which none failed
    text = page.text(({**TOLD, "workloads": {"rag": cells}}, "load.json"))
    assert "| rag, 80% | 3,000, 3,900 | blend |  |  |  |  |  | 0, 1 |" in text


def test_strangers_are_apart_from_the_others() -> None:
    rows = [
        row("80", arm, [request(first), request(9.0, stranger=True, blendable=False)])
        for arm, first in zip(ARMS, (4.0, 4.0, 1.0), strict=True)
    ]
    cell = figures([*rows, *ROWS[3:]])["rag"]["80"]
    assert cell["ttft_p95_by_prefix"]["blend"] == pytest.approx(0.25)
    assert cell["strangers"]["ttft_p95_by_prefix"]["blend"] == pytest.approx(1.0)
    at_once = {"rag": {ALL_AT_ONCE: {**figures(ROWS)["rag"][ALL_AT_ONCE], "strangers": cell["strangers"]}}}
    text = page.text(({**TOLD, "notes": ["Measured before."], "workloads": at_once}, "load.json"))
    assert "| rag, all at once | 9,000, 9,000 | blend | 1.00 | 1.00 |" in text
    assert "\nMeasured before.\n" in text


def test_the_page_has_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    file.write_text(json.dumps({**TOLD, "workloads": figures(ROWS)}))
    measure_load(report=[file])
    text = (tmp_path / "load.md").read_text()
    assert text.startswith(page.ABOUT)
    assert "| rag | 0.39 | blend | 1.65 | 50%, 50% | 50%, 50% of 2 | 1, 0 |" in text
    assert "| rag, 80% | 3,000, 3,900 | blend | " in text


def test_a_page_of_two_runs_has_the_figures_of_both(tmp_path: Path) -> None:
    files = [tmp_path / "load.json", tmp_path / "filled.json"]
    for file, workload in zip(files, ("rag", "mix"), strict=True):
        file.write_text(json.dumps({**TOLD, "workloads": {workload: figures(ROWS)["rag"]}}))
    measure_load(report=files)
    text = (tmp_path / "load.md").read_text()
    assert text.count("3,000, 3,900 | blend | ") == 2
    for file, workload in zip(files, ("rag", "mix"), strict=True):
        assert f"\n{workload}: `" in text
        assert f"| {workload}, 80% | " in text
        assert f"({file.name})" in text
    assert not (tmp_path / "filled.md").exists()


def test_a_stopped_run_goes_on_with_its_own_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "load.rows.jsonl"
    kept = Kept(path, {"rounds": 1})
    kept.add("rag/0", [{**one, "rate": 2.0} for one in CELL])
    with path.open("a") as file:
        file.write('{"repo/0": [{"part"')  # killed while it wrote
    again = Kept(path, {"rounds": 1})
    assert list(again.blocks) == ["rag/0"]
    assert again.rate("rag") == pytest.approx(2.5)
    assert again.rate("repo") is None
    with pytest.raises(ConfigError, match="other settings"):
        Kept(path, {"rounds": 2})

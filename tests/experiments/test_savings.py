"""What a log would save: small streams worked out by hand, blends counted as they compute, and the whole command on a log."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dejakv.cli.main import typer_app
from dejakv.datasets.entries import Entry
from dejakv.decide.costs import ReuseCosts
from dejakv.experiments.reports.advice import reuse_verdict, trial_settings
from dejakv.experiments.savings import SavingsCounter, savings_sentences

A, B, C = (list(range(begin, begin + 64)) for begin in (0, 1000, 2000))


def of(*prompts: list[int], tenants: str = "", times: tuple[float, ...] = ()) -> dict[str, Any]:
    found = SavingsCounter()
    for number, ids in enumerate(prompts):
        tenant, time = tenants[number : number + 1], times[number] if times else None
        found.add(ids, Entry(number, "JSON lines", tenant=tenant, time=time))
    return found.figures()


def test_tokens_computed_by_each_way() -> None:
    found = of(A + B, A + C + B)
    # Of the second prompt, A is a prefix, C is new, and B stands elsewhere but for its last token.
    new = 128
    assert found["computed"] == {
        "full": 128 + 192, "exact": 128 + 128, "blend strict": new + 65, "blend default": new + 65, "blend loose": new + 65,
    }  # fmt: skip
    assert [(part["tokens"], part["prefix"], part["anywhere"]) for part in found["quarters"]] == [
        (32 + 48, 48, 48), (32 + 48, 16, 16), (32 + 48, 0, 16), (32 + 48, 0, 47),
    ]  # fmt: skip


def test_a_quality_computes_its_share_where_little_is_new() -> None:
    prompts = [A + B + C, [9, *B, *C, *A]]
    computed = of(*prompts)["computed"]
    assert computed["blend loose"] == 192 + 2  # the first and the last token
    assert computed["blend default"] == 192 + round(0.2 * 193)
    assert computed["blend strict"] == 192 + round(0.4 * 193)


def test_tenants_share_nothing() -> None:
    found = of(A, A, A, tenants="xyx")
    assert found["by_tenant"] == {
        "x": {"tokens": 128, "prefix": 63, "anywhere": 63}, "y": {"tokens": 64, "prefix": 0, "anywhere": 0},
    }  # fmt: skip
    assert found["computed"]["exact"] == 3 * 64 - 63


def test_hours_and_arrivals() -> None:
    found = of(A, A, A, A, times=(0.0, 1.0, 61.0, 3600.0 + 86400.0))
    assert {hour: part["tokens"] for hour, part in found["by_hour"].items()} == {"0": 192, "1": 64}
    assert found["arrivals"] == {"minutes": 3, "median": 1, "most": 2}
    assert any("by hour of the day (UTC): from" in line for line in savings_sentences(found))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from([A, B, C, [7], [8] * 40]), max_size=5), min_size=1, max_size=6))
def test_ways_are_ordered_and_parts_sum_up(prompts: list[list[list[int]]]) -> None:
    found = of(*(list(chain.from_iterable(parts)) for parts in prompts))
    computed = found["computed"]
    ordered = [computed[name] for name in ("full", "exact", "blend strict", "blend default", "blend loose")]
    assert ordered == sorted(ordered, reverse=True)
    for name in ("tokens", "prefix", "anywhere"):
        total = found["prompt_tokens" if name == "tokens" else f"tokens_{name}"]
        assert sum(part[name] for part in found["quarters"]) == total


def test_seconds_take_the_fastest_plan() -> None:
    found = SavingsCounter()
    for ids in (A + B, C + B):
        found.add(ids, Entry(1, "JSON lines"))
    told = found.figures(ReuseCosts(row=1.0, token_bytes=10.0))
    assert told["seconds"] == {
        "full": 128.0, "exact": 128.0, "blend strict": (128 + 65) / 2, "blend default": (128 + 65) / 2, "blend loose": (128 + 65) / 2,
    }  # fmt: skip
    slow = found.figures(ReuseCosts(row=1.0, blend=1.0))
    assert slow["seconds"]["blend default"] == 128.0, "a blend that takes longer is not made"
    assert told["store_bytes"] == 2560


def test_snapshots_of_recurrent_layers_have_a_price() -> None:
    counter = SavingsCounter()
    for ids in (A + B, A + C, A + C):
        counter.add(ids, Entry(1, "JSON lines"))
    figures = counter.figures(ReuseCosts(row=1.0, token_bytes=1e4, snapshot_bytes=2e6))
    # One at the end of each different prompt, and one where the second parts from the first.
    assert figures["snapshots"] == {"count": 3, "bytes": 2e6, "token_bytes": 1e4}
    (sentence,) = [line for line in savings_sentences(figures) if "snapshots" in line]
    assert "0.01 GB of 3 snapshots" in sentence
    assert "2.00 MB, as the other state of 200 tokens" in sentence
    assert "snapshots" not in counter.figures(ReuseCosts(row=1.0, token_bytes=1e4))


def test_a_trace_of_prefix_blocks() -> None:
    found = SavingsCounter()
    for blocks, tokens in (((1, 2, 3), 1500), ((1, 2, 4), 1100), ((1, 2), 1024)):
        found.add_trace(Entry(1, "Mooncake trace", blocks=blocks, tokens=tokens))
    figures = found.figures()
    assert figures["computed"] == {"full": 3624, "exact": 3624 - 1024 - 1023}
    assert (figures["quarters"], figures["whole_text"]) == ([], False)
    assert trial_settings({**figures, "prompt_tokens": 3624}) == {}
    assert reuse_verdict({**figures, "prompt_tokens": 3624}).startswith("Prefix caching saves 56% of the tokens here")


def test_the_verdict_follows_from_the_figures() -> None:
    assert reuse_verdict(of(A + B + C, [9, *B, *C, *A])).startswith(
        "Worth a trial: a blend would save 40% of the tokens"
    )
    assert reuse_verdict(of(A, A, A)).startswith("Prefix caching is enough: it saves 66% of the tokens")
    assert reuse_verdict(of(A, B, C)) == "Reuse does not pay here: prefixes save 0% of the tokens, and a blend 0% more."


TOWNS = " ".join(
    f"{name} lives in {town}." for name in ("Ann", "Bob", "Eve") for town in ("Oslo", "Rome", "Lima", "Bern")
)


def run(*line: str) -> str:
    done = CliRunner().invoke(typer_app, ["estimate", *line], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_log_of_a_gateway_on_one_screen(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"{begin} {TOWNS}"}] for begin in ("Where is Ann?", "And Bob?", "Who is in Rome?")
    ]
    lines = [
        json.dumps(
            {"call_type": "acompletion", "id": str(n), "messages": chat, "startTime": 3600.0 * n, "end_user": "me"}
        )
        for n, chat in enumerate(chats)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join([*reversed(lines), "{"]))
    out = run(str(tmp_path / "log.jsonl"), "--model", "docs-lm", "--output", str(tmp_path / "out"))
    for words in (
        "3 requests of log.jsonl (LiteLLM log)", "elsewhere in earlier prompts", "blend default", "seconds to prefill a request",
        "by quarter of a prompt", "by tenant (1, which share nothing): me", "a store of all of it takes", "Worth a trial",
        "left out: 1 line that cannot be read, the first at 4: it is no JSON object from column 2 on: write each request on one line", "prove it: dejakv run --model docs-lm --dataset log",
        "--reuse blend",
    ):  # fmt: skip
        assert words in out, words
    assert len(out.splitlines()) < 32
    written = (tmp_path / "out" / "estimate.json").read_text()
    assert TOWNS not in out + written
    again = CliRunner().invoke(typer_app, ["estimate", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "out")])
    assert "exists and is not overwritten" in str(again.exception)
    assert (tmp_path / "out" / "estimate.json").read_text() == written


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a"}', "without partition or user: 1 of 1 request, which count as one tenant's"),
        ("DEBUG 11-03 09:12:00 [l.py:1] Request a details: prompt: 'a', prompt_token_ids: None, prompt_embeds", "at level DEBUG alone"),
        ('{"custom_id": "a", "body": {"prompt": "a"}}', "without a time: 1 of 1 request, so all are taken in the order of the file"),
        ('{"id": "a", "traceId": "t", "type": "GENERATION", "input": "a"}', "only of generations that it stored"),
        ('{"call_type": "completion", "id": "a", "messages": "a"}', "where it stores them (store_prompts_in_spend_logs)"),
        ('{"timestamp": 1, "input_length": 9, "hash_ids": [1]}', "a Mooncake trace has prefix blocks alone"),
    ],
)  # fmt: skip
def test_each_format_says_what_it_cannot_tell(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line + "\n")
    assert says in run(str(tmp_path / "log"))


def test_a_trace_says_what_it_cannot_tell(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.03,110,27\n"
    )
    out = run(str(tmp_path / "azure.csv"))
    assert "times and lengths alone: what was asked before is unknown" in out
    assert "arrivals: 2 a minute" in out
    assert "prove it" not in out


@pytest.mark.parametrize("text", ["", "{", "[]", "TIMESTAMP,ContextTokens\n"])
def test_a_log_without_requests_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    done = CliRunner().invoke(typer_app, ["estimate", str(tmp_path / "log")])
    assert "has no prompts" in str(done.exception)

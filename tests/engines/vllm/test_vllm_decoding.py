"""Requests that decode while blends arrive: by counts, since what a step takes is measured elsewhere (`research/vllm_decoding.py`)."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm_harness import EXTENSION, Engine, running, tokens, worker_side

A = tokens(600, 301)
BUDGET, BLENDS, RUNNING = 256, 20, 3


@dataclass
class Steps:
    """What each step did: tokens scheduled, by request; rows of blends; whether blends were under way."""

    scheduled: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    rows: list[int] = field(default_factory=list[int])
    blending: list[bool] = field(default_factory=list[bool])


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps, side, forward = Steps(), engine.connector.scheduler_side, worker_side().blender.forward
    plan_step, run = side.plan_step, forward.run

    def planned(output: Any, blocks_of: Any) -> Any:
        plan = plan_step(output, blocks_of)
        steps.scheduled.append(dict(output.num_scheduled_tokens))
        steps.rows.append(0)
        steps.blending.append(side.blends.room > 0)
        return plan

    def ran(prompts: Any, **hooks: Any) -> None:
        steps.rows[-1] += sum(len(rows.places) for rows in prompts)
        run(prompts, **hooks)

    monkeypatch.setattr(side, "plan_step", planned)
    monkeypatch.setattr(forward, "run", ran)
    return steps


def params(count: int, mode: str) -> Any:
    from vllm import SamplingParams

    wish = {"kv_transfer_params": {"dejakv": {"mode": mode, "no_store": True}}}
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=wish)


@pytest.mark.parametrize("prefills", [0, 4])
def test_decoding_goes_on(prefills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that has blends under way also computes a token of each running request, and no more rows than its budget has
    left. With `prefills` beside them, which would fill every step, the blends come to their end before these do."""
    extra = {"modes": ["off", "exact", "blend"], "lookup_timeout_s": 30.0, "load_timeout_s": 60.0}
    options = {"worker_extension_cls": EXTENSION, "max_num_batched_tokens": BUDGET, "max_num_seqs": 32}
    with running(extra=extra, **options) as engine:
        engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        steps, llm = watched(engine, monkeypatch), engine.llm.llm_engine

        def add(name: str, ids: list[int], count: int, mode: str) -> None:
            llm.add_request(name, {"prompt_token_ids": ids}, params(count, mode))

        for number in range(RUNNING):
            add(f"running-{number}", tokens(40, 310 + number), 400, "off")
        produced: dict[str, int] = {}
        told: dict[str, dict[str, Any]] = {}
        order: list[str] = []
        blends = [f"blend-{number}" for number in range(BLENDS)]

        def step() -> None:
            for output in llm.step():
                name = output.request_id
                produced[name] = len(output.outputs[0].token_ids)
                if name not in order:
                    order.append(name)
                if output.finished and name in blends:
                    told[name] = (output.kv_transfer_params or {})["dejakv"]

        while len(produced) < RUNNING:
            step()
        for number, name in enumerate(blends):
            add(name, tokens(30, 330 + number) + A[120 + number :], 1, "blend")
        for number in range(prefills):
            add(f"prefill-{number}", tokens(900, 360 + number), 1, "off")
        began = len(steps.rows)
        while len(told) < BLENDS:
            before = [produced[f"running-{number}"] for number in range(RUNNING)]
            step()
            after = [produced[f"running-{number}"] for number in range(RUNNING)]
            assert after == [count + 1 for count in before], "a step without a token of a running request"
        assert [said["method"] for said in told.values()] == ["blend"] * BLENDS
        assert engine.core.scheduler.max_num_scheduled_tokens == BUDGET, "what was left to rows is given back"
        for name in [*blends, *(f"running-{number}" for number in range(RUNNING))]:
            llm.abort_request([name])

        under_way = [number for number in range(began, len(steps.rows)) if steps.rows[number]]
        assert len(under_way) > BLENDS * 30 // BUDGET
        running_ids = [name for name in steps.scheduled[began] if name.startswith("running")]
        assert len(running_ids) == RUNNING
        for number in under_way:
            scheduled = steps.scheduled[number]
            assert all(scheduled[name] == 1 for name in running_ids)
            assert steps.rows[number] + sum(scheduled.values()) <= BUDGET
        if prefills:
            full = [
                number for number in under_way if any(name.startswith("prefill") for name in steps.scheduled[number])
            ]
            assert full, "prompts were computed beside blends"
            assert sum(steps.rows[number] for number in full) > BUDGET

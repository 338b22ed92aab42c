"""Blends in a real engine that computes few tokens a step, seen through its answers, its figures and what its model is given.

All tokens are recomputed, so that a blend's answer is that of full computation if all of it is right.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm_harness import (
    EXTENSION,
    Engine,
    Output,
    Steps,
    greedy,
    recompute_all,
    recomputing_none,
    running,
    tokens,
    worker_side,
)

from dejakv.engines.vllm.blend.blend import BlendRunner
from dejakv.engines.vllm.blend.queue import BlendQueue
from dejakv.engines.vllm.blend.rows import RowForward
from dejakv.store.store import Store

BUDGET = 256
PARTS = [tokens(128, seed) for seed in (101, 102, 103)]
DONORS = [tokens(9, 110 + number) + part for number, part in enumerate(PARTS)]
QUESTION, TAIL = tokens(24, 104), tokens(40, 106)
MOVED = tokens(12, 105) + PARTS[2] + PARTS[0] + PARTS[1] + QUESTION
LATE = DONORS[0] + tokens(27, 107) + PARTS[1] + PARTS[2][:96] + QUESTION
"""It begins as a donor does; another prompt's text stands behind that."""
BLEND, EXACT = {"mode": "blend", "no_store": True}, {"mode": "exact", "no_store": True}
SETTINGS = {
    "mode": "blend", "modes": ["off", "exact", "blend"], "blend_max_share": 1.0, "load_timeout_s": 60,
}  # fmt: skip


@pytest.fixture(scope="module")
def truth() -> dict[tuple[int, ...], tuple[int, ...]]:
    prompts = [*DONORS, MOVED, MOVED + TAIL, MOVED[:192], PARTS[2] + TAIL, LATE, LATE[:160] + TAIL]
    with running(connector=False, enable_prefix_caching=False) as engine:
        return {tuple(prompt): engine.ask([prompt])[0].tokens for prompt in prompts}


@pytest.fixture(scope="module")
def engine(truth: Any) -> Iterator[Engine]:
    options = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 32, "enable_chunked_prefill": True}
    with running(extra=SETTINGS, worker_extension_cls=EXTENSION, **options) as started:
        recompute_all()
        started.ask(DONORS, wish={"mode": "exact"})
        yield started


def ask(engine: Engine, prompt: list[int], wish: dict[str, Any] | None = BLEND, **options: Any) -> Output:
    """One prompt, of which vLLM's own cache has nothing."""
    engine.settle()
    engine.reset_prefix_cache()
    return engine.ask([prompt], wish=wish, **options)[0]


def keys(engine: Engine) -> list[str]:
    """The donors' names."""
    return [ask(engine, donor, EXACT).told["donor"] for donor in DONORS]


def test_passages_of_several_prompts_are_blended(engine: Engine, truth: Any) -> None:
    output = ask(engine, MOVED)
    told = output.told
    assert (told["method"], told["level"], told["approximate"]) == ("blend", "copied", True)
    assert (told["tokens_recomputed"], told["tokens_reused"]) == (len(MOVED) - 16, 0)
    assert output.tokens == truth[tuple(MOVED)]
    assert set(told["donors"]) == set(keys(engine))
    assert told["donor"] == told["donors"][0]


def test_what_is_exact_is_preferred_and_approximate_state_is_nobodys(engine: Engine, truth: Any) -> None:
    """A blended prompt is blended again, computed for who asks for that, and an exact hit for all from then on."""
    engine.ask(DONORS, wish={"mode": "exact"}, salt="own")
    told = [ask(engine, MOVED, {"mode": mode}, salt="own").told for mode in ("blend", "blend", "exact", "blend")]
    assert [(one["method"], one["approximate"]) for one in told] == [
        ("blend", True),
        ("blend", True),
        ("none", False),
        ("exact", False),
    ]


def test_who_asks_for_exact_gets_it_beside_blends(engine: Engine, truth: Any) -> None:
    prompts = [MOVED, MOVED, MOVED + TAIL, MOVED, *DONORS, PARTS[2] + TAIL, MOVED[:192]]
    wishes = [BLEND, EXACT, EXACT, BLEND, *[EXACT] * 5]
    engine.reset_prefix_cache()
    for _ in range(2):
        outputs = engine.ask(prompts, wish=wishes)
        assert not any(one.told["approximate"] for one, wish in zip(outputs, wishes, strict=True) if wish is EXACT)
        assert [one.tokens for one in outputs] == [truth[tuple(prompt)] for prompt in prompts]


def test_wrong_state_of_many_donors_is_never_served_as_exact(engine: Engine, truth: Any) -> None:
    """A ladder of exact requests after a blend that recomputes nothing: its prompt, longer and shorter ones, and each donor, twice."""
    with recomputing_none():
        blended = ask(engine, MOVED)
        assert (blended.told["method"], len(blended.told["donors"])) == ("blend", 3)
        assert blended.tokens != truth[tuple(MOVED)], "the blend must be wrong, or the ladder shows nothing"
        for prompt in [MOVED, MOVED + TAIL, MOVED[:192], PARTS[2] + TAIL, *DONORS] * 2:
            assert engine.ask([prompt], wish=EXACT)[0].tokens == truth[tuple(prompt)]


def test_who_did_not_ask_is_told_of_what_is_approximate(engine: Engine) -> None:
    engine.reset_prefix_cache()
    exact, blended = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in (DONORS[0], [*tokens(20, 5), *DONORS[1][20:]])],
        greedy(1, no_wish=True),
        use_tqdm=False,
    )
    assert exact.kv_transfer_params is None
    assert blended.kv_transfer_params["dejakv"]["approximate"]


def test_what_vllm_holds_stays_and_is_shared(engine: Engine, truth: Any) -> None:
    """A late edit: the beginning is vLLM's own, and what the blend puts behind it is nobody's who asks for exact."""
    engine.settle()
    engine.reset_prefix_cache()
    engine.ask([LATE[:160] + TAIL], wish={"mode": "off", "no_store": True})
    (blended,) = engine.ask([LATE], wish=BLEND)
    assert (blended.told["method"], blended.tokens) == ("blend", truth[tuple(LATE)])
    assert blended.told["tokens_recomputed"] == len(LATE) - 160 - 16
    for prompt in (LATE, LATE[:160] + TAIL, DONORS[0]):
        (exact,) = engine.ask([prompt], wish=EXACT)
        assert (exact.told["approximate"], exact.tokens) == (False, truth[tuple(prompt)])
        assert exact.cached > 0


def test_donors_may_be_named_within_the_partition(engine: Engine) -> None:
    """Whether a donor exists elsewhere is not told."""
    first, second, _ = keys(engine)
    named = ask(engine, MOVED, {**BLEND, "donors": [first, second]})
    assert named.told["donors"] == [first, second]
    for donor in (first, "0" * 40):
        foreign = ask(engine, MOVED, {**BLEND, "donors": [donor]}, salt="two")
        assert foreign.told["method"] == "none"
        assert foreign.told["reason"] == "named: a donor that the request names is not known in its partition"


def test_a_request_says_how_alike_is_enough(engine: Engine) -> None:
    assert ask(engine, MOVED, {**BLEND, "threshold": 1.0}).told["method"] == "none"


@pytest.mark.parametrize(("prompt", "method"), [(MOVED, "none"), (LATE, "exact")])
def test_a_draft_beyond_its_limit_is_not_made(
    engine: Engine, truth: Any, prompt: list[int], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is ordered from the worker but the exact prefix, where there is one; the rest is computed."""
    side, before = engine.connector.scheduler_side, engine.metrics().get("vllm:dejakv_blends_refused", 0)
    monkeypatch.setattr(side, "save_limits", replace(side.save_limits, max_pending_tokens=len(prompt)))
    assert ask(engine, prompt).told["method"] == "blend"
    monkeypatch.setattr(side, "save_limits", replace(side.save_limits, max_pending_tokens=len(prompt) - 1))
    output = ask(engine, prompt)
    assert (output.told["method"], output.told["approximate"]) == (method, False)
    assert output.told["reason"].startswith("too long: ")
    assert output.tokens == truth[tuple(prompt)]
    assert engine.metrics()["vllm:dejakv_blends_refused"] == before + 1


def test_partitions_do_not_see_each_other(engine: Engine, truth: Any) -> None:
    other = ask(engine, MOVED, salt="two")
    assert (other.told["method"], other.told["donor"], other.cached) == ("none", None, 0)
    assert other.tokens == truth[tuple(MOVED)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gone", "gone or cannot be read"),
        ("shape", "another shape"),
        ("dtype", "another dtype"),
        ("raises", "the store failed: OSError"),
    ],
)
def test_a_donor_that_cannot_be_used_is_left_out(
    engine: Engine, truth: Any, case: str, words: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is blended from the others; the cause is told, counted and in the log."""
    first, second, third = keys(engine)
    real, before = Store.get_parts, engine.metrics().get("vllm:dejakv_donors_left_out", 0)

    def get_parts(store: Any, id: str, *more: Any) -> Any:
        parts = real(store, id, *more)
        if id != second:
            return parts
        if case == "raises":
            raise OSError("the disk is gone")
        if case == "gone":
            return None
        tensors = [one.tensor for one in parts]
        if case == "dtype":
            tensors = [replace(one, data=one.data.astype(np.float16), dtype="F16") for one in tensors]
        else:
            tensors = [replace(one, data=one.data[..., 1:]) for one in tensors]
        return [replace(one, tensor=tensor) for one, tensor in zip(parts, tensors, strict=True)]

    monkeypatch.setattr(Store, "get_parts", get_parts)
    output = ask(engine, MOVED)
    assert set(output.told["donors"]) == {first, third}
    assert output.told["reason"].startswith("1 of the donors left out")
    assert words in output.told["reason"]
    assert words in caplog.text
    assert output.tokens == truth[tuple(MOVED)]
    assert engine.metrics()["vllm:dejakv_donors_left_out"] == before + 1


@pytest.mark.parametrize("fails", ["begin", "forward"])
def test_a_blend_that_fails_costs_itself_alone(engine: Engine, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beside it are blended, or fail with it where the error is in the forward that they share. The model is what it was."""
    prompts = [tokens(20 + number, 120 + number) + MOVED[30 + 5 * number :] for number in range(3)]
    truths = [one.tokens for one in engine.ask(prompts, wish={"mode": "off", "no_store": True}, salt="truth")]
    engine.settle()
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        if fails == "begin":
            begin = BlendRunner.begin

            def failing(blender: BlendRunner, blend: Any) -> None:
                if len(blend.draft.ids) == len(prompts[1]):
                    raise RuntimeError("no memory")
                begin(blender, blend)

            patch.setattr(BlendRunner, "begin", failing)
        else:
            forward = RowForward.forward
            calls = iter([False, True])
            patch.setattr(RowForward, "forward", lambda *given: 1 / 0 if next(calls, False) else forward(*given))
        outputs = engine.ask(prompts, wish=BLEND)
    assert [one.tokens for one in outputs] == truths
    reasons = [one.told["reason"] for one in outputs]
    if fails == "begin":
        assert reasons == ["", "the load failed: RuntimeError", ""]
    else:
        assert "the load failed: ZeroDivisionError" in reasons
    again = [ask(engine, prompt) for prompt in prompts]
    assert [(one.told["method"], one.tokens) for one in again] == [("blend", truth) for truth in truths]


@pytest.fixture
def steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    engine.settle()
    engine.reset_prefix_cache()
    made = Steps(engine)
    monkeypatch.setattr(engine.llm.llm_engine, "step", made.step)
    yield made
    made.hook.remove()


def test_a_step_has_a_forward_for_all_blends_and_one_for_each_question(
    engine: Engine, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside vLLM's own, where tokens are chosen by the question's attention, as at the default quality."""
    monkeypatch.setattr(BlendQueue, "_pays", lambda *_: True)
    choosing = replace(engine.connector.settings.blend_config(), share=0.7)
    monkeypatch.setattr(worker_side().blend_runner, "config", choosing)
    run, asking, computing = RowForward.run, list[int](), list[int]()

    def counted(forward: RowForward, *given: Any, **named: Any) -> None:
        if "on_queries" in named or "on_written" in named:
            (asking if "on_queries" in named else computing).append(len(steps.tokens))
        run(forward, *given, **named)

    monkeypatch.setattr(RowForward, "run", counted)
    prompts = [tokens(30, 390 + number) + MOVED[40 + number : 300] for number in range(4)]
    outputs = engine.ask(prompts, wish=BLEND, max_tokens=1)
    assert [output.told["method"] for output in outputs] == ["blend"] * len(prompts)
    assert len(asking) == len(prompts)
    assert len(computing) == len(set(computing))


@pytest.mark.parametrize("prefills", [0, 8])
def test_decoding_goes_on_beside_blends(
    engine: Engine, steps: Steps, prefills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step gives a token to each request that decodes, and its model computes no more tokens than the budget. Blends come to their
    end beside prompts that would fill every step, those too that full computation would have done sooner."""
    monkeypatch.setattr(BlendQueue, "_pays", lambda *_: True)
    llm = engine.llm.llm_engine
    decoding, blends = [f"decode-{number}" for number in range(3)], [f"blend-{number}" for number in range(12)]
    for number, name in enumerate(decoding):
        llm.add_request(name, {"prompt_token_ids": tokens(40, 310 + number)}, greedy(400, mode="off", no_store=True))
    produced: dict[str, int] = {}
    told: dict[str, Any] = {}

    def step() -> None:
        for output in llm.step():
            produced[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished and output.request_id in blends:
                told[output.request_id] = output.kv_transfer_params["dejakv"]

    while len(produced) < len(decoding):
        step()
    for number, name in enumerate(blends):
        prompt = tokens(30, 330 + number) + MOVED[40 + number : 300]
        llm.add_request(name, {"prompt_token_ids": prompt}, greedy(1, **BLEND))
    for number in range(prefills):
        ids = {"prompt_token_ids": tokens(900, 360 + number)}
        llm.add_request(f"prefill-{number}", ids, greedy(1, mode="off", no_store=True))
    began = len(steps.tokens)
    while len(told) < len(blends):
        before = [produced[name] for name in decoding]
        step()
        assert [produced[name] for name in decoding] == [count + 1 for count in before]
    waiting = [f"prefill-{number}" for number in range(prefills)]
    assert not prefills or set(waiting) - set(produced), "blends waited for all of the prompts beside them"
    llm.abort_request([*decoding, *waiting])
    assert [one["method"] for one in told.values()] == ["blend"] * len(blends)
    assert max(steps.tokens[began:]) <= BUDGET
    computed = sum(one["tokens_recomputed"] + 16 for one in told.values())
    assert sum(steps.tokens[began:]) >= computed > BUDGET


def test_aborted_blends_stop_at_the_next_step(engine: Engine, steps: Steps) -> None:
    """Nothing is computed for a client that has left, and its blocks are free."""
    llm, names = engine.llm.llm_engine, [f"left-{number}" for number in range(10)]
    for number, name in enumerate(names):
        prompt = tokens(30, 30 + number) + MOVED[60 + number :]
        llm.add_request(name, {"prompt_token_ids": prompt}, greedy(1, **BLEND))
    while not steps.tokens or not steps.tokens[-1]:
        llm.step()
    llm.abort_request(names)
    began = len(steps.tokens)
    for _ in range(10):
        llm.step()
    assert sum(steps.tokens[began:]) == 0
    engine.settle()
    assert engine.metrics()["vllm:kv_cache_usage_perc"] == 0


def test_a_blend_whose_donors_take_too_long_is_computed(
    engine: Engine, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, real, late, there = time.monotonic, Store.get_parts, [0.0], threading.Event()
    engine.ask(
        DONORS, wish={"mode": "exact"}, salt="late"
    )  # nobody reads these yet, as drafts of clients that left may do
    engine.settle()

    def get_parts(*given: Any) -> Any:
        late[0] = 100.0
        there.wait(60)
        return real(*given)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + late[0])
    monkeypatch.setattr(Store, "get_parts", get_parts)
    output = ask(engine, MOVED, salt="late")
    there.set()
    assert output.told["reason"] == "the load took too long: 60 s"
    assert (output.told["approximate"], output.tokens) == (False, truth[tuple(MOVED)])


def test_a_blend_that_waits_for_its_share_of_steps_is_not_late(
    engine: Engine, steps: Steps, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read and recomputed for it is not thrown away."""
    clock, late = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late[0])
    steps.then = lambda: late.__setitem__(0, late[0] + 100.0)
    (output,) = engine.ask([MOVED], wish=BLEND)
    assert late[0] > 100.0, "it was recomputed in one step"
    assert (output.told["method"], output.tokens) == ("blend", truth[tuple(MOVED)])

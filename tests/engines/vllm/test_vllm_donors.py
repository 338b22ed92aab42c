"""Blends from several stored prompts, through a real engine: found as copied text, held to what is exact, and never shared."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm_harness import EXTENSION, running, tokens, worker_side

from dejakv.store.base import Chunk, Tensor

PARTS = [tokens(128, seed) for seed in (101, 102, 103)]
DONORS = [tokens(9, 110 + number) + part for number, part in enumerate(PARTS)]
QUESTION = tokens(24, 104)
MOVED = tokens(12, 105) + PARTS[2] + PARTS[0] + PARTS[1] + QUESTION
TAIL = tokens(40, 106)
BLEND = {"mode": "blend", "no_store": True}
EXACT = {"mode": "exact", "no_store": True}
SETTINGS = {"modes": ["off", "exact", "blend"], "blend_max_share": 1.0}
"""As documented, but for the share above which a prompt is computed: no encoder, donors by copied text alone."""


@pytest.fixture(scope="module")
def truth():
    """The answers of an engine without a connector, each computed in full."""
    prompts = [*DONORS, MOVED, MOVED + TAIL, MOVED[:192], PARTS[2] + TAIL, LATE, LATE[:LATE_EDIT] + TAIL]
    with running(connector=False, enable_prefix_caching=False) as engine:
        return {tuple(prompt): engine.ask([prompt], max_tokens=8)[0].tokens for prompt in prompts}


LATE_EDIT = 160
LATE = DONORS[0] + tokens(27, 107) + PARTS[1] + PARTS[2][:96] + QUESTION
"""A conversation that went on: the beginning is what another prompt began with, other prompts' text stands behind it."""


@pytest.fixture
def engine():
    with running(extra=SETTINGS, worker_extension_cls=EXTENSION) as running_engine:
        running_engine.ask(DONORS)
        running_engine.settle()
        running_engine.reset_prefix_cache()
        yield running_engine


def _id_of(prompt):
    (found,) = [meta.id for meta in worker_side().store.metas() if list(meta.token_ids) == list(prompt)]
    return found


def _no_rows():
    """Has blends compute nothing: whatever follows from such state is wrong."""
    blender = worker_side().blender
    blender.config = replace(blender.config, selector="similarity", share=0.0, by_need=False, offsets=False, tail=1)


def test_donors_are_found_as_copied_text_and_named(engine, truth):
    """Three prompts, each with a passage of this one at another place. With every row computed the answer is exact."""
    blender = worker_side().blender
    blender.config = replace(blender.config, share=1.0)
    (output,) = engine.ask([MOVED], wish=BLEND, max_tokens=8)
    told = output.told
    assert (told["method"], told["level"], told["approximate"]) == ("blend", "copied", True)
    assert set(told["donors"]) == {_id_of(donor) for donor in DONORS}
    assert told["donor"] == told["donors"][0]
    assert output.tokens == truth[tuple(MOVED)]
    metrics = engine.metrics()
    assert metrics["vllm:dejakv_loaded_donors"] == 3


def test_each_donors_rows_move_from_their_own_places(engine):
    """What is not computed is the donors' own, value by value, and its keys are those of the new places."""
    _no_rows()
    blender, loads = worker_side().blender, worker_side().loads
    read = []
    store = worker_side().store
    metas = [store.meta(_id_of(donor)) for donor in DONORS]

    def reading(id, rows):
        read.append(id)
        return loads._read(id, rows)

    draft = blender.draft(MOVED, 0, len(MOVED), metas, reading, loads.buffers)
    assert sorted(read) == sorted(meta.id for meta in metas)
    for number, start in ((2, 12), (0, 140), (1, 268)):
        there = torch.from_numpy(store.get(metas[number].id).tensor.data.copy())[:, :, :, 9:]
        here = draft.state[:, :, :, start : start + 128]
        assert torch.equal(here[1], there[1])
        moved = there[0].clone()
        blender.rotary.move(moved, torch.arange(9, 137), torch.arange(start, start + 128))
        assert torch.equal(here[0], moved)
    behind = blender.draft(MOVED[:396], 140, 396, metas, reading, loads.buffers)
    assert read[3:] == [metas[number].id for number in (0, 1)], "a donor of what vLLM holds is not read"
    assert torch.equal(behind.state[:, :, :, 140:268], draft.state[:, :, :, 140:268])


def _damaged(case):
    """Has the store hand out something that is not what it holds for the second donor."""
    store, which = worker_side().store, _id_of(DONORS[1])
    get_parts = store.get_parts

    def changed(chunk, id):
        if id != which:
            return chunk
        if case == "raises":
            raise OSError("the disk is gone")
        made = {
            "gone": None,
            "shape": chunk and Chunk(chunk.meta, Tensor(chunk.tensor.data[:, :1], "F32"), chunk.rows),
            "dtype": chunk and Chunk(chunk.meta, Tensor(chunk.tensor.data.astype(np.float16), "F16"), chunk.rows),
        }
        return made[case]

    def in_parts(parts, id):
        made = [changed(part, id) for part in parts]
        return None if None in made else made

    store.get_parts = lambda id, rows=None: in_parts(get_parts(id, rows), id)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gone", "gone or cannot be read"),
        ("shape", "another shape"),
        ("dtype", "another dtype"),
        ("raises", "the store failed: OSError"),
    ],
)
def test_a_donor_that_cannot_be_used_is_left_out(engine, truth, case, words, caplog):
    """The prompt is blended from the others, with the missing passage computed; the cause is told, counted and in the log."""
    _damaged(case)
    blender = worker_side().blender
    blender.config = replace(blender.config, share=1.0)
    (output,) = engine.ask([MOVED], wish=BLEND, max_tokens=8)
    assert set(output.told["donors"]) == {_id_of(DONORS[0]), _id_of(DONORS[2])}
    assert words in output.told["reason"]
    assert output.told["reason"].startswith("1 of the donors left out")
    assert words in caplog.text
    assert output.tokens == truth[tuple(MOVED)]
    assert engine.metrics()["vllm:dejakv_donors_left_out"] == 1


def test_what_is_left_may_not_be_worth_a_blend(engine, truth):
    """Without its donor too much must be computed: the exact prefix is taken instead, and the reason names both."""
    blender = worker_side().blender
    blender.config = replace(blender.config, max_share=0.4)
    _damaged("gone")
    (output,) = engine.ask([LATE], wish=BLEND, max_tokens=8)
    assert (output.told["method"], output.told["level"]) == ("exact", "prefix")
    assert output.told["donors"] == [_id_of(DONORS[0])]
    assert "too little is alike" in output.told["reason"]
    assert "gone or cannot be read" in output.told["reason"]
    assert output.tokens == truth[tuple(LATE)]


def test_late_edits_keep_what_vllm_holds_and_blend_behind_it(engine, truth):
    """With prefix caching on: the beginning is vLLM's own and stays shared, and what the blend puts behind it is private."""
    engine.ask([LATE[:LATE_EDIT] + TAIL], wish=EXACT)  # the beginning lies in vLLM's prefix cache now
    _no_rows()
    seen = []
    blender, paged = worker_side().blender, worker_side().paged
    begin = blender.begin

    def watched(draft, block_ids):
        first = draft.plan.first
        seen.append((paged.gather(block_ids, first), draft, block_ids))
        return begin(draft, block_ids)

    blender.begin = watched
    (blended,) = engine.ask([LATE], wish=BLEND, max_tokens=8)
    assert blended.told["method"] == "blend"
    assert len(blended.told["donors"]) >= 2
    ((exact, draft, block_ids),) = seen
    assert exact.shape[3] == draft.plan.first == LATE_EDIT
    assert torch.equal(paged.gather(block_ids, LATE_EDIT), exact)
    assert blended.tokens != truth[tuple(LATE)], "the blend must be wrong, or nothing is shown"
    for prompt in (LATE, LATE[:LATE_EDIT] + TAIL, DONORS[0]):
        (again,) = engine.ask([prompt], wish=EXACT, max_tokens=8)
        assert again.tokens == truth[tuple(prompt)]
        assert again.cached > 0


def test_poisoning_ladder_of_many_donors(engine, truth):
    """After a blend from three donors, whatever is asked exactly is as if nothing had been blended."""
    wrong = _climb(engine, truth)
    assert wrong == []


def test_the_ladder_of_many_donors_detects_poison(engine, truth, monkeypatch):
    """The same with the re-key switched off."""
    monkeypatch.setattr("dejakv.engines.vllm.scheduler.rekey_tail", lambda request, first, upto=None: True)
    assert "MOVED" in _climb(engine, truth)


def _climb(engine, truth):
    """The names of the wrong answers: of the blended prompt, longer and shorter ones and each donor, twice."""
    _no_rows()
    ladder = {"MOVED": MOVED, "longer": MOVED + TAIL, "beginning": MOVED[:192], "passage": PARTS[2] + TAIL}
    ladder |= {f"donor {number}": donor for number, donor in enumerate(DONORS)}
    (blended,) = engine.ask([MOVED], wish=BLEND, max_tokens=8)
    assert len(blended.told["donors"]) == 3
    assert blended.tokens != truth[tuple(MOVED)], "the blend must be wrong, or the ladder shows nothing"
    wrong = []
    for name, prompt in [*ladder.items()] * 2:
        (output,) = engine.ask([prompt], wish=EXACT, max_tokens=8)
        if output.tokens != truth[tuple(prompt)]:
            wrong.append(name)
    return wrong


def test_a_donor_that_is_longer_than_this_servers_context(tmp_path):
    """Stored by a server that takes longer prompts: what this one can use of it is used, as a blend and as an exact prefix."""
    long = tokens(600, 301) + PARTS[0] + tokens(100, 302)
    settings = {**SETTINGS, "store_dir": str(tmp_path)}
    with running(extra=settings, worker_extension_cls=EXTENSION) as engine:
        engine.ask([long])
        engine.settle()
    prompts = [tokens(12, 303) + PARTS[0] + QUESTION, long[:320] + QUESTION]
    with running(extra=settings, worker_extension_cls=EXTENSION, max_model_len=512) as engine:
        blender = worker_side().blender
        blender.config = replace(blender.config, share=1.0)
        off = {"mode": "off", "no_store": True}
        truth = [engine.ask([prompt], wish=off, salt="truth", max_tokens=8)[0].tokens for prompt in prompts]
        blended, exact = (
            engine.ask([prompt], wish=wish, max_tokens=8)[0]
            for prompt, wish in zip(prompts, (BLEND, EXACT), strict=True)
        )
        assert (blended.told["method"], blended.told["donors"]) == ("blend", [_id_of(long)])
        assert (exact.told["method"], exact.computed) == ("exact", len(prompts[1]) - 320)
        assert [blended.tokens, exact.tokens] == truth

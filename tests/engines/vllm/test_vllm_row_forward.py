"""Rows computed by vLLM's own forward: held to a forward that is written out, and to what vLLM computes of a whole prompt."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llama_rows import computed_rows
from vllm_harness import BLENDING, EXTENSION, changed, running, tokens, worker_side

from dejakv.engines.vllm import bind
from dejakv.engines.vllm.blend.mixing import Mixing
from dejakv.engines.vllm.blend.model_check import CHECKED_ROWS, ModelCheck
from dejakv.engines.vllm.blend.rows import Batch, PromptRows
from dejakv.engines.vllm.pages import Buffers

A = tokens(401, 11)
B = changed(A, 0.2, 12)
BLOCKS = tuple(range(20, 5, -1))
"""Blocks that no request has while the engine is at rest."""


@pytest.fixture(scope="module")
def engine():
    with running(extra=BLENDING, worker_extension_cls=EXTENSION) as running_engine:
        running_engine.ask([A])
        running_engine.settle()
        yield running_engine


def draft_of(prompt, *, first=0, stop=None, exact=False):
    """From the one stored state. `exact`: as far as it is the prompt's prefix, it stands."""
    blender, store = worker_side().blender, worker_side().store
    (meta,) = store.metas(partition="default")
    chunk = store.get(meta.id)
    there = meta if exact else replace(meta, generation=1)
    draft = blender.draft(prompt, first, stop or len(prompt), [there], lambda *_: (chunk,), Buffers(1 << 24))
    return replace(draft, proof=None)


def blended(drafts, rows, *, room=10_000, runs=None, blocks=(BLOCKS,)):
    """The states in the blocks after all rows were computed, and how many each forward computed."""
    blender = worker_side().blender
    before, blender.forward.most_runs = blender.forward.most_runs, runs
    try:
        mixing = []
        for draft, some, mine in zip(drafts, rows, blocks, strict=True):
            blender.paged.scatter(mine, draft.plan.first, draft.state[:, :, :, draft.plan.first : draft.plan.end])
            mixing.append(Mixing(draft, mine, blender.paged.block_tokens, some))
        counts = []
        while any(len(one.rows) for one in mixing):
            counts.append(blender.advance(mixing, room))
    finally:
        blender.forward.most_runs = before
    return [blender.paged.gather(one.block_ids, one.draft.plan.end) for one in mixing], counts


def near(made, wanted):
    return float((made - wanted).abs().max() / wanted.abs().max()) < 1e-4


def model(engine):
    return bind.bound_runner(engine.llm.llm_engine.vllm_config).get_model()


def some_rows(share, seed, stop=len(B)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(stop, generator=generator)[: round(share * stop)].sort().values


@pytest.mark.parametrize("share", [0.02, 0.15, 0.6, 1.0])
def test_blend_equals_reference_forward(engine, share):
    """The rows that are computed, those that move with them and those that stay, in every layer."""
    draft, rows = draft_of(B), some_rows(share, 1)
    wanted = computed_rows(model(engine), draft, rows)
    ((made,), counts) = blended([draft], [rows])
    assert counts == [len(rows)]
    assert near(made, wanted)
    left = torch.ones(len(B), dtype=torch.bool)
    left[rows] = False
    if share < 1.0:
        assert not torch.equal(made[:, 1:][:, :, :, left], draft.state[:, 1:][:, :, :, left]), "offsets move rows"


def test_blends_share_a_step(engine):
    """Rows of three prompts in one forward are those of three forwards, and none touches another's blocks."""
    drafts = [draft_of(B), draft_of(A[40:] + B[:20], stop=360), draft_of(changed(A, 0.1, 13))]
    rows = [some_rows(0.2, number, draft.plan.end) for number, draft in enumerate(drafts)]
    blocks = [tuple(range(start, start + 13)) for start in (40, 60, 80)]
    alone = [
        blended([draft], [some], blocks=[mine])[0][0] for draft, some, mine in zip(drafts, rows, blocks, strict=True)
    ]
    together, counts = blended(drafts, rows, blocks=blocks)
    assert counts == [sum(map(len, rows))]
    for made, wanted in zip(together, alone, strict=True):
        assert near(made, wanted)


@pytest.mark.parametrize(("room", "runs"), [(64, None), (10_000, 7), (50, 5)])
def test_rows_in_several_forwards_are_those_of_one(engine, room, runs):
    """No more rows or runs than there is room for in a forward, and nothing else changes. Without offsets, since a piece of more
    rows than fit is moved by the last of them alone."""
    draft, rows = draft_of(B), some_rows(0.5, 3)
    draft = replace(draft, plan=replace(draft.plan, runs=None))
    ((wanted,), _) = blended([draft], [rows])
    ((made,), counts) = blended([draft], [rows], room=room, runs=runs)
    assert len(counts) > 1
    assert sum(counts) == len(rows)
    assert max(counts) <= room
    assert near(made, wanted)


def test_offsets_hold_across_forwards(engine):
    """Pieces whose rows fit are not torn apart, so several forwards move rows as one does; rows of a torn one are not lost."""
    moved = A[200:330] + A[20:150] + tokens(30, 5)
    draft = draft_of(moved)
    rows = some_rows(0.3, 4, len(moved))
    ((wanted,), _) = blended([draft], [rows])
    ((made,), counts) = blended([draft], [rows], room=60)
    assert len(counts) > 1
    assert near(made, wanted)
    ((torn,), _) = blended([draft], [rows], room=7)
    assert near(torn[:, 0], wanted[:, 0])


def test_what_others_share_is_not_written(engine):
    """Blocks before the first row that is not vLLM's already: read, and left as they are."""
    blender, paged = worker_side().blender, worker_side().paged
    draft = draft_of(A[:64] + B[64:], first=64, exact=True)
    shared = torch.randn(paged.shape(64), generator=torch.Generator().manual_seed(1))
    paged.scatter(BLOCKS, 0, shared)
    chunk = worker_side().store.get(next(iter(worker_side().store.metas(partition="default"))).id)
    blender.model_check.checked = 0
    draft = replace(draft, proof=chunk)
    blender.check(draft, BLOCKS)
    mixing = blender.begin(draft, BLOCKS)
    assert blender.model_check.checked == len(BLOCKS[2:]) * paged.block_tokens or blender.model_check.checked == len(A)
    blender.advance([mixing], 10_000)
    assert torch.equal(paged.gather(BLOCKS, 64), shared)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_check_that_an_error_ended_is_made_again(engine, monkeypatch, failing):
    """Whichever of its two forwards failed, say for want of memory: no blend goes unchecked because of that."""
    blender = worker_side().blender
    made, run, calls = blender.model_check, blender.forward.run, itertools.count()
    check = ModelCheck(blender.forward, blender.paged, blender.rotary, made.max_positions)
    chunk = worker_side().store.get(next(iter(worker_side().store.metas(partition="default"))).id)

    def run_or_fail(*args, **hooks):
        if next(calls) == failing:
            raise MemoryError
        run(*args, **hooks)

    monkeypatch.setattr(blender.forward, "run", run_or_fail)
    with pytest.raises(MemoryError):
        check.check(chunk, BLOCKS)
    assert check.rows(chunk, BLOCKS) == 2 * CHECKED_ROWS
    assert check.check(chunk, BLOCKS) == ""
    assert check.rows(chunk, BLOCKS) == 0
    assert next(calls) == failing + 3, "both forwards were run"


def test_connectors_see_nothing_of_it(engine, monkeypatch):
    """vLLM calls connectors around each attention layer of a step: not around those of a blend, which has no step's rows."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group, called = get_kv_transfer_group(), []
    monkeypatch.setattr(group, "save_kv_layer", lambda *args, **kwargs: called.append("save"))
    monkeypatch.setattr(group, "wait_for_layer_load", lambda *args: called.append("wait"))
    monkeypatch.setattr(group, "_connector_metadata", "a step's")
    blended([draft_of(B)], [some_rows(0.2, 5)])
    assert called == []
    assert group._connector_metadata == "a step's"
    engine.ask([tokens(40, 6)], wish={"mode": "off", "no_store": True})
    assert called


def test_a_failed_forward_leaves_the_model_as_it_was(engine, monkeypatch):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    draft, group = draft_of(B), get_kv_transfer_group()
    impl = worker_side().paged.attention(1).impl
    with monkeypatch.context() as patch:
        patch.setattr(type(impl), "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            blended([draft], [some_rows(0.2, 7)])
    assert not {"forward", "do_kv_cache_update"} & set(vars(impl))
    ((made,), _) = blended([draft], [torch.arange(len(B))])
    assert near(made, computed_rows(model(engine), draft, torch.arange(len(B))))
    assert not group.has_connector_metadata()


@given(st.lists(st.sets(st.integers(0, 90), min_size=1), min_size=1, max_size=3))
def test_a_batch_holds_each_row_once(places):
    """Whatever the order in which runs stand in it: token, position, slot and sequence of each row are its own."""
    prompts = []
    for number, some in enumerate(places):
        rows = torch.tensor(sorted(some))
        prompts.append(PromptRows(rows + 1000 * number, rows, tuple(range(10 * number + 1, 10 * number + 4)), number))
    batch = Batch.of(prompts, 32)
    lengths = batch.starts.diff().tolist()
    assert lengths == sorted(lengths)
    assert len(batch.ids) == sum(map(len, places)) == sum(lengths)
    for number, (rows, at) in enumerate(zip(prompts, batch.of_prompt, strict=True)):
        assert torch.equal(batch.ids[at], rows.ids)
        assert torch.equal(batch.positions[at], rows.places + number)
        assert batch.slots[at].tolist() == [rows.block_ids[p // 32] * 32 + p % 32 for p in rows.places.tolist()]
        sequence = np.searchsorted(batch.starts[1:].numpy(), at.numpy(), side="right")
        for index, row, place in zip(sequence.tolist(), at.tolist(), rows.places.tolist(), strict=True):
            assert batch.lengths[index] - (int(batch.starts[index + 1]) - row) == place
            assert batch.blocks[index, :3].tolist() == list(rows.block_ids)

"""What a blend is made of, on a real engine: the question's attention, the checks of the model, moved keys."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_harness import BLENDING, DOCS, EXTENSION, changed, running, tokens, worker_side

from dejakv.blend.recomputed import highest
from dejakv.engines.vllm.blend.blend import question_attention
from dejakv.engines.vllm.blend.model_check import ModelCheck
from dejakv.engines.vllm.blend.rotary import Rotary
from dejakv.engines.vllm.pages import Buffers
from dejakv.errors import ModelError
from dejakv.store.base import KV, Chunk, Tensor

A = tokens(401, 11)
B = changed(A, 0.2, 12)
BLOCKS = tuple(range(20, 8, -1))
"""Blocks that no request has while the engine is at rest."""


@pytest.fixture(scope="module")
def engine():
    with running(extra=BLENDING, worker_extension_cls=EXTENSION) as running_engine:
        running_engine.ask([A], salt="donor-less")
        running_engine.ask([A])
        running_engine.settle()
        yield running_engine


def test_the_questions_attention_is_the_models_own_and_chooses_rows(engine):
    """From a state that is exact: the weights are those that transformers works out, and the rows are the forced ones and the
    best of them, weighed by their surroundings. The last rows lie behind the request's blocks."""
    from transformers import AutoModelForCausalLM

    blender = worker_side().blender
    stored = _stored()
    approximate = replace(
        stored, meta=replace(stored.meta, generation=1)
    )  # else all of it is an exact prefix, and nothing is chosen
    draft = _draft(blender, A, approximate)
    draft = _with(draft, asks=True, share=0.2, runs=None)
    assert len(A) == 32 * len(BLOCKS) + 17
    blender.paged.scatter(BLOCKS, 0, draft.state[:, :, :, : 32 * len(BLOCKS)])
    got, rows = question_attention(blender.forward, blender.paged, draft, BLOCKS)
    assert rows == draft.tail > 17
    model = AutoModelForCausalLM.from_pretrained(DOCS, attn_implementation="eager")
    with torch.inference_mode():
        layers = model(torch.tensor([A]), output_attentions=True).attentions
    wanted = sum(layer[0, :, -draft.tail :].sum((0, 1)) for layer in layers[2:])
    assert torch.allclose(got, wanted, rtol=1e-2, atol=1e-3 * float(wanted.max()))

    draft = _with(draft, stop=32 * len(BLOCKS))
    mixing = blender.begin(draft, BLOCKS)
    assert mixing.asked == rows
    weighed = got * torch.from_numpy(draft.plan.around.worth)
    kept = highest(weighed, draft.plan.forced, round(0.2 * len(A)))
    assert mixing.rows.tolist() == [row for row in kept.tolist() if row < 32 * len(BLOCKS)]


def test_a_question_behind_more_than_one_block_is_seen_as_far_as_there_are_slots(engine):
    """vLLM was told to compute more than a block by itself: the question's first rows ask alone."""
    blender = worker_side().blender
    draft = _draft(blender, A, replace(_stored(), meta=replace(_stored().meta, generation=1)))
    draft = replace(_with(draft, runs=None), tail=60)
    few = BLOCKS[:10]
    blender.paged.scatter(few, 0, draft.state[:, :, :, :320])
    got, rows = question_attention(blender.forward, blender.paged, draft, few)
    assert rows == 352 - (len(A) - 60)
    assert got[352:].abs().sum() == 0
    assert got[:352].sum() > 0


def _stored():
    """The prompt's state that was stored without a salt. Rows of blends may stand beside it."""
    (meta,) = [meta for meta in worker_side().store.metas(partition="default") if meta.kind == KV]
    return worker_side().store.get(meta.id)


def _draft(blender, prompt, *chunks):
    """The draft of a prompt of which vLLM holds nothing and computes nothing."""
    chunk_of = {chunk.meta.id: chunk for chunk in chunks}
    metas = [chunk.meta for chunk in chunks]
    return blender.draft(prompt, 0, len(prompt), metas, lambda id, _: (chunk_of[id],), Buffers(1 << 24))


def _with(draft, **values):
    """The draft with other values in its plan."""
    return replace(draft, plan=replace(draft.plan, **values))


def test_a_model_without_a_rotary_table_is_refused():
    """Named by its layer, at the start."""
    attention = torch.nn.Identity()

    class Holder(torch.nn.Module):
        def __init__(self, rotary):
            super().__init__()
            self.attn, self.rotary_emb = attention, rotary

    for rotary in (None, SimpleNamespace(long_cos_sin_cache=1, is_neox_style=True)):
        with pytest.raises(ModelError, match=r"layer 0 of Holder has no rotary table.*--reuse exact or adopt"):
            Rotary.of(Holder(rotary), [attention])
    rotary = SimpleNamespace(cos_sin_cache=1, is_neox_style=True)
    assert Rotary.of(Holder(rotary), [attention]).rotaries == (rotary,)


@pytest.fixture
def check(engine):
    """The checks of the engine's model, as before the first blend."""
    blender = worker_side().blender
    return ModelCheck(blender.forward, blender.paged, blender.rotary, 1024)


def test_a_forward_that_differs_far_into_a_prompt_is_found_out(check, monkeypatch):
    """As of a backend that attends to no more than 300 tokens: the first hundred tokens are right."""
    chunk, inputs = _stored(), check.forward._inputs
    real = inputs.forward

    def short(batch):
        batch.lengths.clamp_(max=300)
        real(batch)

    monkeypatch.setattr(inputs, "forward", short)
    first = Chunk(
        replace(chunk.meta, token_ids=chunk.meta.token_ids[:90]),
        Tensor(np.ascontiguousarray(chunk.tensor.data[:, :, :, :90]), "F32"),
    )
    assert check.check(first, BLOCKS) == ""
    assert "the end of a stored state of 384 tokens gave another one" in check.check(chunk, BLOCKS)
    assert check.check(first, BLOCKS) != "", "what is wrong once stays off"


def test_a_state_is_checked_as_far_as_there_are_blocks_and_once(check, monkeypatch):
    chunk = _stored()
    assert check.check(chunk, BLOCKS[:5]) == ""
    assert check.checked == 160
    assert check.check(chunk, (*BLOCKS, 70)) == ""
    assert check.checked == len(A)
    monkeypatch.setattr(check.forward, "run", None)  # whatever ran it would fail
    assert check.check(chunk, (*BLOCKS, 70)) == ""
    assert check.check(None, BLOCKS) == ""


@pytest.mark.parametrize("wrong", ["layer", "direction"])
def test_keys_that_are_rotated_otherwise_than_they_are_moved_are_found_out(check, monkeypatch, wrong):
    """As in a model of which some layers do not rotate, or rotate by another rule."""
    real = check.rotary.move

    def move(keys, source, target):
        before = keys.clone()
        real(keys, *((source, target) if wrong == "layer" else (target, source)))
        if wrong == "layer":
            keys[2] = before[2]

    monkeypatch.setattr(check.rotary, "move", move)
    assert "computed again further on is not its moved self" in check.check(_stored(), BLOCKS)


def test_a_model_that_is_found_out_computes_its_prompts(engine, monkeypatch):
    """The reason is told, and no further blend is tried."""
    blender = worker_side().blender
    monkeypatch.setattr(blender.model_check, "problem", "blend was switched off: a test")
    engine.reset_prefix_cache()
    said = engine.ask([B], wish={"mode": "blend"})[0].told
    assert (said["method"], said["approximate"]) == ("none", False)
    assert "blend was switched off: a test" in said["reason"]
    scheduler = engine.connector.scheduler_side
    assert scheduler.no_blend == "blend was switched off: a test"
    scheduler.no_blend = ""


FEW = ([3, 9, 10, 40], [3, 0, 50, 41])
"""Source and target of single rows."""
MANY = (
    [*range(5, 45), *range(45, 75), *range(100, 120), *range(10), *range(100, 140)],
    [*range(40), *range(45, 75), *range(90, 110), *range(10), *range(139, 99, -1)],
)
"""A long run, rows that stay, a short run, rows that stay, and a run of which each row moves by another distance."""


@pytest.mark.parametrize(("source", "target"), [FEW, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("width", [8, 6])
def test_moved_keys_are_those_of_their_new_places(halves, width, dtype, source, target):
    """Keys rotated for one place and moved equal keys rotated for the other, also with scaled tables (YaRN); the rest of a partly
    rotated head stays."""
    half, scale = width // 2, 1.3
    angles = torch.arange(150)[:, None] / 10 ** torch.arange(half)[None]
    table = scale * torch.cat([angles.cos(), angles.sin()], 1)
    rotary = SimpleNamespace(cos_sin_cache=table, is_neox_style=halves)
    source, target = torch.tensor(source), torch.tensor(target)
    plain = torch.randn(2, 3, len(source), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def rotated(places):
        cos, sin = scale * angles[places].cos(), scale * angles[places].sin()
        turned = plain[..., :width]
        one, other = turned.chunk(2, -1) if halves else (turned[..., 0::2], turned[..., 1::2])
        pair = (one * cos - other * sin, other * cos + one * sin)
        turned = torch.cat(pair, -1) if halves else torch.stack(pair, -1).flatten(-2)
        return torch.cat([turned, plain[..., width:]], -1).to(dtype)

    keys = rotated(source)
    keys[:, :, ::2, 0] = -0.0  # a zero that is turned by nothing would lose its sign
    before = keys.clone()
    Rotary([rotary] * 2).move(keys, source, target)
    wanted, compared = rotated(target), torch.ones(len(source), dtype=torch.bool)
    compared[::2] = False
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(keys[:, :, compared], wanted[:, :, compared], **near)
    stays = source == target
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(keys[:, :, stays].view(bits), before[:, :, stays].view(bits))  # bit for bit
    assert torch.equal(keys[..., width:], before[..., width:])

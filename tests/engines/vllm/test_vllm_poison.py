"""Approximate state never reaches an exact request, whatever comes after it and however full the cache is."""

import random
from dataclasses import replace

import pytest
from vllm_harness import BLENDING, EXTENSION, changed, running, tokens, worker_side

from dejakv.engines.vllm.blend import names
from dejakv.engines.vllm.blend.queue import BlendQueue

LENGTH = 345
A = tokens(LENGTH, 21)
C = tokens(LENGTH, 22)
NEAR = [changed(A, 0.25, seed) for seed in range(30, 36)]
TAIL = tokens(40, 23)
LOCAL = C[:192] + NEAR[0][192:]
POOL = {"num_gpu_blocks_override": 57, "max_num_seqs": 16, "max_num_batched_tokens": 512}
"""57 blocks of 32 tokens hold five of these prompts: waiting, evictions and preemptions are certain."""
BLEND = {"mode": "blend", "no_store": True}


def _asked(prompts, count, seed):
    """A mixed batch: which prompt, whether with a tail, whether blended."""
    rng = random.Random(seed)
    return [(rng.choice(prompts), rng.random() < 0.3, rng.random() < 0.4) for _ in range(count)]


MIX = _asked([*NEAR, LOCAL, C, A], 200, 7)


def _batch(engine, *, blends):
    prompts = [prompt + TAIL if longer else prompt for prompt, longer, _ in MIX]
    wishes = [BLEND if blended and blends else None for _, _, blended in MIX]
    return engine.ask(prompts, max_tokens=24, wish=wishes if blends else None)


@pytest.fixture(scope="module")
def truth():
    """The same requests with the connector off."""
    with running(connector=False, **POOL) as engine:
        single = {}
        for name, prompt in {"B": NEAR[0], "B+40": NEAR[0] + TAIL, "local": LOCAL, "C": C}.items():
            (single[name],) = engine.ask([prompt], max_tokens=8)
        return single, _batch(engine, blends=False), engine.metrics()


@pytest.fixture(scope="module")
def engine(truth):
    # Every lookup finds A: nothing but the named donor is ever blended from, and nothing else is stored.
    with running(extra=BLENDING, worker_extension_cls=EXTENSION, **POOL) as running_engine:
        running_engine.ask([A])
        running_engine.settle()
        blender = worker_side().blend_runner
        blender.config = replace(blender.config, share=0.0, by_need=False, offsets=False, tail=1)
        yield running_engine


def _blend(engine, prompt, donor, **options):
    (output,) = engine.ask([prompt], max_tokens=8, wish={**BLEND, "donors": [donor]}, **options)
    return output


def _donor():
    (donor,) = [meta.id for meta in worker_side().store.metas() if list(meta.token_ids) == A]
    return donor


def _ladder(engine, truth):
    """Climbs the ladder; the names of the wrong answers."""
    single, _, _ = truth
    donor, wrong = _donor(), []

    def check(name, prompt):
        (output,) = engine.ask([prompt], max_tokens=8, wish={"mode": "exact", "no_store": True})
        if output.tokens != single[name].tokens:
            wrong.append(name)

    engine.reset_prefix_cache()
    first = _blend(engine, NEAR[0], donor)
    assert first.told["method"] == "blend", first.told
    assert first.tokens != single["B"].tokens, "the blend must be wrong, or the ladder shows nothing"
    check("B", NEAR[0])
    check("B+40", NEAR[0] + TAIL)
    check("C", C)
    local = _blend(engine, LOCAL, donor)
    assert local.told["method"] == "blend", local.told
    assert local.cached > LENGTH - 64
    check("local", LOCAL)
    check("C", C)
    check("B", NEAR[0])
    return wrong


def _mixed(engine, truth):
    """200 requests under memory pressure: the wrong answers, and the levels of those that were approximate."""
    _, batch, _ = truth
    donor, wrong = _donor(), []
    wishes = [{**BLEND, "donors": [donor]} if blended else {"no_store": True} for _, _, blended in MIX]
    prompts = [prompt + TAIL if longer else prompt for prompt, longer, _ in MIX]
    outputs = engine.ask(prompts, max_tokens=24, wish=wishes)
    for index, output in enumerate(outputs):
        if not output.told["approximate"] and output.tokens != batch[index].tokens:
            wrong.append(f"batch {index}")
    return wrong, [output.told["level"] for output in outputs if output.told["approximate"]]


@pytest.fixture(autouse=True)
def every_blend_is_made(monkeypatch):
    """Whatever the load, so that there are many."""
    monkeypatch.setattr(BlendQueue, "_pays", lambda *_: True)


def test_poisoning_ladder(engine, truth):
    """0 wrong answers, on every rung and in 200 mixed requests under memory pressure."""
    before = engine.metrics()["vllm:num_preemptions"]
    assert _ladder(engine, truth) == []
    wrong, levels = _mixed(engine, truth)
    assert wrong == []
    assert len(levels) >= 10
    assert "prefix" in levels, "some take blended blocks of others"
    assert engine.metrics()["vllm:num_preemptions"] > before


def test_without_approximate_names_the_ladder_finds_wrong_answers(engine, truth, monkeypatch):
    """Its control: blended blocks filed under the hashes of their text are served to exact requests."""
    monkeypatch.setattr(names, "approximate_name", lambda setting, block_hash: block_hash)
    assert "B" in _ladder(engine, truth)

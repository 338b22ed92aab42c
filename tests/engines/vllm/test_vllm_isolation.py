"""Tenants and adapters never see each other: not their state, not whether somebody else asked."""

import pytest
from peft_adapter import LORA, adapter, write_adapter
from vllm_harness import BLENDING, EXTENSION, changed, running, tokens, worker_side

from dejakv.engines.vllm.keys import partition_of

A = tokens(301, 41)


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """Two adapters, written before the server starts."""
    root = tmp_path_factory.mktemp("adapters")
    return [adapter(name, seed, write_adapter(root / name, seed)) for seed, name in enumerate(("left", "right"), 1)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory, loras):
    extra = {**BLENDING, "store_dir": str(tmp_path_factory.mktemp("store"))}
    with running(extra=extra, worker_extension_cls=EXTENSION, **LORA) as running_engine:
        yield running_engine


def test_isolation(engine, loras):
    """Two salts never cross, nor does a salt with no salt, nor do two adapters or one with none; the same does hit."""
    (first,) = engine.ask([A], salt="one")
    engine.settle()
    assert first.told["method"] == "none"
    for other in ("two", None, "one "):
        engine.reset_prefix_cache()
        (crossed,) = engine.ask([A], salt=other, wish={"no_store": True})
        assert crossed.told["method"] == "none"
        assert crossed.cached == 0
        assert crossed.tokens == first.tokens
    engine.reset_prefix_cache()
    (same,) = engine.ask([A], salt="one")
    assert same.told["method"] == "exact"
    assert same.computed <= 32
    assert same.tokens == first.tokens

    left, right = loras
    engine.reset_prefix_cache()
    (adapted,) = engine.ask([A], salt="adapted", lora=left)
    engine.settle()
    assert adapted.cached == 0
    assert adapted.tokens != first.tokens
    for salt, lora in (("adapted", right), ("adapted", None), ("one", left), (None, left)):
        engine.reset_prefix_cache()
        (crossed,) = engine.ask([A], salt=salt, lora=lora, wish={"no_store": True})
        assert crossed.told["method"] == "none"
        assert crossed.cached == 0
        assert (crossed.tokens == adapted.tokens) == (lora is left)
    engine.reset_prefix_cache()
    (same,) = engine.ask([A], salt="adapted", lora=left)
    assert same.told["method"] == "exact"
    assert same.computed <= 32
    assert same.tokens == adapted.tokens


def test_similar_prompts_do_not_cross(engine):
    """Blend neither: a near-duplicate in another partition finds nothing, in its own it does."""
    near = changed(A, 0.05, 42)
    wish = {"mode": "blend", "no_store": True}
    (own,) = engine.ask([near], salt="one", wish=wish)
    assert own.told["method"] == "blend"
    (other,) = engine.ask([near], salt="two", wish=wish)
    assert other.told["method"] == "none"
    assert other.told["donor"] is None


def test_named_donor_of_another_partition(engine):
    """A donor that a client names must be in its own partition. Whether it exists elsewhere is not told."""
    store = worker_side().store
    (donor,) = [meta.id for meta in store.metas(partition=partition_of("one")) if list(meta.token_ids) == A]
    near = changed(A, 0.05, 43)
    (foreign,) = engine.ask([near], salt="two", wish={"mode": "blend", "donor": donor, "no_store": True})
    (nowhere,) = engine.ask([near], salt="two", wish={"mode": "blend", "donor": "0" * 40, "no_store": True})
    assert foreign.told["method"] == nowhere.told["method"] == "none"
    unknown = "named: a donor that the request names is not known in its partition"
    assert foreign.told["reason"] == nowhere.told["reason"] == unknown
    (own,) = engine.ask([near], salt="one", wish={"mode": "blend", "donor": donor, "no_store": True})
    assert own.told["method"] == "blend"
    assert own.told["donor"] == donor


def test_prompt_logprobs_get_no_reuse(engine):
    """Every prompt token is computed, since its probability is asked for."""
    engine.reset_prefix_cache()
    (output,) = engine.ask([A], salt="one", prompt_logprobs=1)
    assert output.cached == 0
    assert output.told["reason"] == "prompt_logprobs need every prompt token computed"


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"mode": "fuzzy"}, "unknown mode 'fuzzy'"),
        ({"threshold": 1.5}, "threshold 1.5 is no cosine"),
        ({"threshold": "high"}, "threshold 'high' is no cosine"),
        ({"no_store": "yes"}, "no_store 'yes' is neither true nor false"),
        ({"donor": 7}, "donor is no string"),
        ({"donors": [7]}, "donors is no list of strings"),
        ({"donors": ["a"] * 17}, "17 donors: the server takes state of at most blend_donors=16"),
        ({"donor": "a", "donors": ["b"]}, "donor and donors: give one of them"),
        ({"partition": "two"}, "unknown field 'partition'"),
        ("everything", "kv_transfer_params.dejakv is no object"),
    ],
)
def test_bad_wishes_are_plain_misses(engine, wish, reason):
    """Answered, without reuse, and told why; nothing of it is stored."""
    (output,) = engine.ask([A[:100]], wish=wish)
    engine.settle()
    assert len(output.tokens) == 6
    assert output.told["method"] == "none"
    assert output.told["reason"].startswith(reason)
    assert not [meta for meta in worker_side().store.metas() if list(meta.token_ids) == A[:100]]


def test_mode_off_and_threshold(engine):
    engine.reset_prefix_cache()
    (off,) = engine.ask([A], salt="one", wish={"mode": "off"})
    assert off.cached == 0
    assert off.told["reason"] == "mode is off"
    near = changed(A, 0.3, 44)
    (output,) = engine.ask([near], salt="one", wish={"mode": "blend", "threshold": 1.0, "no_store": True})
    assert output.told["method"] == "none"
    engine.reset_prefix_cache()
    (output,) = engine.ask([near], salt="one", wish={"mode": "blend", "no_store": True})
    assert output.told["method"] == "blend", output.told["reason"]

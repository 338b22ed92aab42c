"""Two ranks, each with its own heads in its own store: together they are exact, and what one of them lost nobody has."""

import pytest
from vllm_harness import BLENDING, EXTENSION, ONE, RANKS, TWO, confirmed, running, state_of, tokens, use_two_cpus

from dejakv.blend.settings import DEFAULT, QUALITIES
from dejakv.store.claim import file_of

A, B, C = (tokens(261, seed) for seed in (81, 82, 83))


@pytest.fixture(autouse=True)
def _two_cpus(monkeypatch):
    use_two_cpus(monkeypatch)


@pytest.mark.shows("exact", "blend", "ranks", model="docs-lm")
def test_two_ranks_on_two_machines(tmp_path, bucket, s3_server):
    """What one machine's ranks put into a bucket another's load, exactly and for a blend; a part that is deleted or damaged costs the hit,
    not the answer; a store of one rank is another store."""
    extra = BLENDING | {"store": bucket, "memory_bytes": 0, "load_timeout_s": 60}
    moved, blend = [_moved(A, 91)], {"mode": "blend", "no_store": True}
    with running(extra=extra | {"disk_dir": str(tmp_path / "alone")}, **ONE) as one:
        truth = one.ask([A, B, C])
        one.settle()

    with running(extra=extra | {"disk_dir": str(tmp_path / "first")}, **TWO) as two:
        first = two.ask([A, B, C])
        confirmed(two)
        two.reset_prefix_cache()
        (again,), (blended,) = two.ask([A]), two.ask(moved, wish=blend)
        assert two.metrics()["vllm:dejakv_saves"] == 3
    assert [output.tokens for output in first] == [output.tokens for output in truth]
    assert [(output.told["method"], output.cached) for output in first] == [("none", 0)] * 3
    assert again.told["method"] == "exact"
    assert again.tokens == truth[0].tokens
    assert blended.told["method"] == "blend", blended.told["reason"]

    (_, left), (_, right), (_, whole) = (state_of(bucket, rank, A) for rank in (*RANKS, ""))
    assert left.tensor.shape == right.tensor.shape
    assert left.tensor.shape[4] * 2 == whole.tensor.shape[4], "each rank stores half of the heads"
    assert left.meta.epoch == right.meta.epoch != whole.meta.epoch
    lost, spoiled = (
        f"/{bucket.removeprefix('s3://')}/{rank}/segments/{state_of(bucket, rank, prompt)[0]}.safetensors"
        for rank, prompt in ((RANKS[1], B), (RANKS[0], C))
    )
    s3_server.request("DELETE", lost)
    data = bytearray(s3_server.request("GET", spoiled))
    data[len(data) // 2] ^= 0xFF
    s3_server.request("PUT", spoiled, bytes(data))

    with running(extra=extra | {"disk_dir": str(tmp_path / "second")}, **TWO) as two:
        hit, deleted, corrupt = (two.ask([prompt], wish={"no_store": True})[0] for prompt in (A, B, C))
        assert (hit.told["method"], hit.told["level"]) == ("exact", "exact_text")
        assert hit.computed <= 32
        assert hit.told["bytes_loaded"] == 2 * left.tensor.nbytes // (left.tensor.shape[3] * left.tensor.page) * (
            len(A) - 1
        )
        for output in (deleted, corrupt):
            assert output.told["method"] == "none"
            assert output.cached == 0
        assert deleted.told["reason"] == "no stored prompt begins like this one", "seen when the store is opened"
        assert corrupt.told["reason"] == "the donor's state is gone or cannot be read"
        (there,) = two.ask(moved, wish=blend)
        assert there.told["method"] == "blend", there.told["reason"]
        two.reset_prefix_cache()
        (later,) = two.ask([B])
        assert later.told["reason"] == "no stored prompt begins like this one", "what one rank lost is a miss for all"
        metrics = two.metrics()
    assert (there.tokens, there.told["bytes_loaded"]) == (blended.tokens, blended.told["bytes_loaded"])
    assert [output.tokens for output in (hit, deleted, corrupt)] == [output.tokens for output in truth]
    assert later.tokens == truth[1].tokens
    assert metrics["vllm:dejakv_load_failures"] == 1
    assert metrics["vllm:dejakv_loads"] == 2


def _moved(head, seed):
    """A document behind another beginning, with its parts in another order."""
    return tokens(12, seed) + head[120:240] + tokens(10, seed + 1) + head[20:130]


def test_blend_two_ranks(tmp_path):
    """Blended by two ranks as by one: the same rows of the same donors, the same answer. A part that one rank lost costs the blend,
    and neither the answer nor the engine."""
    moved = [_moved(A, 91), _moved(B, 95)]
    extra = {
        "modes": ["off", "exact", "blend"],
        "blend_max_share": 1.0,
        "blend_selector": QUALITIES[DEFAULT].selector,
        "blend_share": 0.4,
        "memory_bytes": 0,
        "lookup_timeout_s": 60,
        "load_timeout_s": 60,
    }
    blend, off = {"mode": "blend", "no_store": True}, {"mode": "off", "no_store": True}
    with running(extra=extra | {"store_dir": str(tmp_path / "one")}, worker_extension_cls=EXTENSION, **ONE) as one:
        truth = [one.ask([prompt], wish=off, salt="truth")[0] for prompt in moved]
        one.ask([A, B])
        one.settle()
        one.reset_prefix_cache()
        wanted = one.ask(moved, wish=blend)
    assert [output.told["method"] for output in wanted] == ["blend"] * 2

    store = tmp_path / "two"
    with running(extra=extra | {"store_dir": str(store)}, worker_extension_cls=EXTENSION, **TWO) as two:
        two.ask([A, B])
        confirmed(two)
        two.reset_prefix_cache()
        got = two.ask(moved, wish=blend)
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.told["method"] == "blend", mine.told["reason"]
            assert mine.told["tokens_recomputed"] == theirs.told["tokens_recomputed"]
            assert mine.told["bytes_loaded"] == theirs.told["bytes_loaded"]
            assert mine.tokens == theirs.tokens
        two.reset_prefix_cache()
        (store / RANKS[1] / "segments").joinpath(*file_of(state_of(store, RANKS[1], B)[0])).unlink()
        lost, fine = two.ask(moved[::-1], wish=blend)
        assert (lost.told["method"], lost.cached) == ("none", 0)
        assert lost.told["reason"] == "the donor's state is gone or cannot be read"
        assert lost.tokens == truth[1].tokens
        assert fine.told["method"] == "blend"
        assert fine.tokens == wanted[0].tokens

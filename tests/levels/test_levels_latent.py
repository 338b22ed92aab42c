"""Latent layers: specs, and when several layers together name a donor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.decide.levels.base import Level, Query, Vectors
from dejakv.decide.levels.latent import EmbeddingCache
from dejakv.errors import ConfigError
from dejakv.request import Request
from dejakv.testing.levels import LevelTests
from dejakv.vectors.spaces import LayerSpec


def at(cosine: float, dim: int = 2) -> np.ndarray:
    """A unit vector at this cosine to the first axis."""
    row = np.zeros(dim, np.float32)
    row[0], row[1] = cosine, np.sqrt(1 - cosine**2)
    return row


AXIS = at(1.0)


def query(vectors: Vectors, space: str = "s") -> Query:
    return Query(Request("r", "p", "c"), space, lambda: vectors)


class TestLatent(LevelTests):
    def make(self) -> Level:
        return EmbeddingCache(["prompt:4:0.9", "vision:3:0.9"])

    def query(self, topic: int, space: str = "s") -> Query:
        return query({"prompt": np.eye(4, dtype=np.float32)[topic], "vision": np.ones(3, np.float32)}, space)

    def test_empty_text_matches_nothing(self, level: Level) -> None:
        empty = query({})
        level.add("empty", empty)
        search = level.search(empty)
        assert search.matches == ()
        assert set(search.statuses.values()) == {"skip"}


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("prompt:384:0.8", LayerSpec("prompt", 384, 0.8)),
        ("vision:512", LayerSpec("vision", 512, 0.85)),
        ("x:3:0", LayerSpec("x", 3, 0.0)),
        ("x:3:-1", LayerSpec("x", 3, -1.0)),
        ("prompt:auto:0.93", LayerSpec("prompt", None, 0.93)),
    ],
)
def test_specs(text: str, spec: LayerSpec) -> None:
    assert LayerSpec.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vision", "NAME:DIM"),
        ("a:b:c:d", "NAME:DIM"),
        (":3", "name"),
        ("x:wide", "'x:wide'"),
        ("x:0", "dimension 0"),
        ("x:-3", "dimension -3"),
        ("x:3:high", "'x:3:high'"),
        ("x:3:1.5", "-1 to 1"),
        ("x:3:nan", "-1 to 1"),
        ("mean:3", "mean"),
    ],
)
def test_bad_specs_are_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LayerSpec.parse(text)


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="one name"):
        EmbeddingCache(["a:2", "a:3"])
    with pytest.raises(ConfigError, match="all, any, mean"):
        EmbeddingCache(["a:2"], "best")  # type: ignore[arg-type]


def test_same_picture_with_another_question_is_no_match_unless_any_is_asked_for() -> None:
    """The fault of the prototypes: the best score over layers lets `vision` alone decide."""
    results = {}
    for match in ("all", "any", "mean"):
        cache = EmbeddingCache(["prompt:2:0.8", "vision:2:0.8"], match)  # type: ignore[arg-type]
        cache.add("other question", query({"prompt": at(0.1), "vision": AXIS}))
        results[match] = cache.search(query({"prompt": AXIS, "vision": AXIS}))
    assert results["all"].matches == ()
    assert set(results["all"].statuses.values()) == {"miss"}
    assert results["mean"].matches == ()
    assert results["any"].matches[0].level == "embedding:vision"
    assert results["any"].statuses == {"embedding:prompt": "miss", "embedding:vision": "hit"}


def test_the_mean_of_scores_reaches_the_mean_of_thresholds() -> None:
    cache = EmbeddingCache(["prompt:2:0.8", "vision:2:0.6"], "mean")
    cache.add("a", {"prompt": AXIS, "vision": AXIS})
    assert cache.thresholds["embedding:mean"] == pytest.approx(0.7)
    match = cache.search({"prompt": at(0.9), "vision": at(0.6)})
    assert match is not None
    assert match.level == "embedding:mean"
    assert match.score == pytest.approx(0.75, abs=1e-4)
    assert cache.search({"prompt": at(0.9), "vision": at(0.45)}) is None


def test_a_missing_layer_is_skipped_and_agrees_with_nothing() -> None:
    cache = EmbeddingCache(["prompt:2", "vision:2"])
    cache.add("whole", query({"prompt": AXIS, "vision": AXIS}))
    cache.add("half", query({"prompt": AXIS}))
    search = cache.search(query({"prompt": AXIS}))
    assert search.matches == ()
    assert search.statuses == {"embedding:prompt": "miss", "embedding:vision": "skip"}
    found = cache.search(query({"prompt": AXIS, "vision": AXIS}))
    assert [match.donor for match in found.matches] == ["whole"]
    assert found.statuses == {"embedding:prompt": "hit", "embedding:vision": "hit"}


def test_zero_and_nan_vectors_count_as_absent() -> None:
    cache = EmbeddingCache(["prompt:2"])
    cache.add("a", query({"prompt": np.zeros(2, np.float32)}))
    assert len(cache) == 0
    assert cache.search(query({"prompt": np.full(2, np.nan, np.float32)})).statuses == {"embedding:prompt": "skip"}


def test_wrong_dimension_names_layer_dimension_and_flag() -> None:
    cache = EmbeddingCache(["prompt:384:0.8"])
    with pytest.raises(ConfigError, match=r"'prompt'.*384.*prompt:2:0.8 in embedding_layers \(--embedding-layer\)"):
        cache.search(query({"prompt": AXIS}))
    with pytest.raises(ConfigError, match=r"prompt:2:0\.8 in embedding_layers \(--embedding-layer\)"):
        cache.add("a", query({"prompt": AXIS}))


def test_auto_dimension_is_settled_by_the_first_vector() -> None:
    cache = EmbeddingCache(["prompt:auto:0.9"])
    cache.add("a", query({"prompt": AXIS}))
    with pytest.raises(ConfigError, match="dimension 2"):
        cache.search(query({"prompt": np.ones(3, np.float32)}))


@pytest.mark.parametrize("index", ["flat", "hnsw"])
@pytest.mark.parametrize("match", ["all", "mean"])
def test_many_donors_above_one_layer_do_not_hide_the_one_above_both(match: str, index: str) -> None:
    """600 questions on one picture and 600 pictures under one question: one donor is both."""
    rng = np.random.default_rng(0)
    cache = EmbeddingCache(["prompt:16:0.9", "vision:16:0.9"], match, index=index)  # type: ignore[arg-type]
    axis = np.eye(16, dtype=np.float32)[0]
    for number in range(600):
        away = rng.standard_normal(16).astype(np.float32) * [0, *[1] * 15]
        cache.add(f"q{number}", {"prompt": away, "vision": axis})
        cache.add(f"v{number}", {"prompt": axis, "vision": away})
    cache.add("both", {"prompt": at(0.95, 16), "vision": at(0.95, 16)})
    found = cache.search({"prompt": axis, "vision": axis})
    assert found is not None
    assert found.donor == "both"


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(*[st.floats(-1, 1)] * 2), min_size=1, max_size=40),
    st.sampled_from(["all", "any", "mean"]),
    st.tuples(*[st.floats(-0.9, 0.9)] * 2),
)
def test_equals_brute_force(donors: list[tuple[float, float]], match: str, thresholds: tuple[float, float]) -> None:
    cache = EmbeddingCache([LayerSpec(n, 2, t) for n, t in zip("pv", thresholds, strict=True)], match)  # type: ignore[arg-type]
    for number, (p, v) in enumerate(donors):
        cache.add(str(number), {"p": at(p), "v": at(v)})
    eps = 1e-5

    def passes(p: float, v: float, slack: float) -> bool:
        marks = (p - thresholds[0] + slack, v - thresholds[1] + slack)
        return {"all": min(marks), "any": max(marks), "mean": sum(marks)}[match] >= 0

    found = cache.search({"p": AXIS, "v": AXIS})
    if any(passes(p, v, -eps) for p, v in donors):
        assert found is not None
    if found is not None:
        assert passes(*donors[int(found.donor)], eps)
        values = [
            {
                "all": p + v,
                "any": max(x for x, t in zip((p, v), thresholds, strict=True) if x >= t + eps),
                "mean": p + v,
            }[match]
            for p, v in donors
            if passes(p, v, -eps)
        ]
        got = found.score if match == "any" else sum(found.layers.values())
        assert not values or got >= max(values) - 1e-4

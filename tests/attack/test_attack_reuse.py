"""Attacks on what is reused: each holds, and each finds the hole that is planted."""

from collections.abc import Callable

import pytest
from tests.attack.weak import always_adopts, one_partition, sharing, sharing_without_words, without_words

from dejakv.api_keys import ApiKeys
from dejakv.attack.collision import KeyCollision
from dejakv.attack.figures import Estimate, Share
from dejakv.attack.leakage import Leakage
from dejakv.attack.poisoning import Poisoning
from dejakv.attack.scene import Scene
from dejakv.errors import ModelError
from dejakv.find.ask import Ask

Scenes = Callable[..., Scene]


def test_collisions_are_found_and_not_served(scene: Scenes) -> None:
    result = KeyCollision().run(scene(encoders=("model",)))
    assert result.verdict == "held", result.reason
    collided = result.figures["model: victims with a collision by cosine"]
    assert isinstance(collided, Share)
    assert collided.count == 2
    assert "lexical" in str(result.figures["model: refused by"])


def test_a_collision_is_served_without_the_guard_of_words(scene: Scenes) -> None:
    result = KeyCollision().run(scene(encoders=("model",), build=without_words))
    assert result.verdict == "broken"
    assert "used under adopt" in result.reason
    assert "used under exact" not in result.reason


def test_a_collision_is_served_where_exact_is_not_exact(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ask, "of", always_adopts)
    result = KeyCollision().run(scene(encoders=("model",), build=without_words))
    assert "used under exact" in result.reason


def test_an_encoder_that_was_named_must_be_there(scene: Scenes) -> None:
    with pytest.raises(ModelError, match="no-such-encoder"):
        KeyCollision().run(scene(encoders=("no-such-encoder",)))


def test_poisoning_changes_nothing_that_is_exact_or_anothers(scene: Scenes) -> None:
    result = Poisoning().run(scene())
    assert result.verdict == "held", result.reason
    blended = result.figures["same partition, blend: answered approximately"]
    assert isinstance(blended, Share)
    assert blended.count


def test_poisoning_across_partitions_is_found(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiKeys, "partition_of", one_partition)
    result = Poisoning().run(scene())
    assert result.verdict == "broken"
    assert "another partition" in result.reason


def test_poisoning_under_exact_reuse_is_found(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ask, "of", always_adopts)
    monkeypatch.setattr("dejakv.server.app.build_cache", without_words)
    result = Poisoning().run(scene())
    assert result.verdict == "broken"
    assert "under exact reuse" in result.reason
    planted = result.figures["same partition, exact: the planted fact"]
    assert isinstance(planted, Share)
    assert planted.count


def test_a_blend_leaks_nothing_to_another_partition(scene: Scenes) -> None:
    result = Leakage().run(scene())
    assert result.verdict == "held", result.reason
    blended = result.figures["same partition: blended"]
    assert isinstance(blended, Share)
    assert blended.count


def test_a_blend_of_another_partitions_state_is_found(scene: Scenes) -> None:
    result = Leakage().run(scene(build=sharing))
    assert result.verdict == "broken"
    assert "other partition: a prompt was run from the state" in result.reason


def test_a_leaked_secret_ranks_above_chance(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor's own prompt runs in the place of the target's: its answer is the secret."""
    monkeypatch.setattr(Ask, "of", always_adopts)
    result = Leakage().run(scene(build=sharing_without_words))
    ranked = result.figures["other partition: rank of the secret (AUC)"]
    assert isinstance(ranked, Estimate)
    assert ranked.low > 0.9
    assert "ranks above other values" in " ".join(result.findings)

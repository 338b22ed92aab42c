"""Attacks across partitions: each holds, and each finds the hole that is planted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.attack.weak import SharingRegistry, one_budget, one_partition, sharing

from dejakv import pipeline
from dejakv.api_keys import ApiKeys
from dejakv.attack import client
from dejakv.attack.figures import Estimate
from dejakv.attack.probing import Probing
from dejakv.attack.scene import Scene
from dejakv.attack.shared_parts import SharedParts
from dejakv.attack.timing import Timing
from dejakv.identity import exact_key
from dejakv.server import app as server_app
from dejakv.server.gate import Caller, Keys
from dejakv.server.service import Service

Scenes = Callable[..., Scene]


def test_probing_finds_nothing(scene: Scenes) -> None:
    result = Probing().run(scene())
    assert result.verdict == "held", result.reason


def everything_is_one_tenants(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ApiKeys, "partition_of", one_partition)


def state_is_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server_app, "build_cache", sharing)


def everybody_is_the_operator(patch: pytest.MonkeyPatch) -> None:
    known = Keys.caller

    def caller(keys: Keys, key: str | None) -> Caller | None:
        found = known(keys, key)
        return replace(found, operator=True) if found else None

    patch.setattr(Keys, "caller", caller)


def budgets_are_not_divided(patch: pytest.MonkeyPatch) -> None:
    made = server_app.cache_config
    patch.setattr(server_app, "cache_config", lambda *given: replace(made(*given), partitions=1))


def ids_tell_the_content(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("dejakv.find.finder.exact_key", lambda _partition, *others: exact_key("", *others))


def names_are_ids_of_the_text(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Service, "name_entry", lambda _service, _partition, _id, wanted: wanted or "p0123")


def names_are_shared(patch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def name_entry(_service: Service, _partition: str, chunk_id: str, wanted: str | None) -> str:
        given.extend([wanted] if wanted else [])
        return given[0] if given else chunk_id

    patch.setattr(Service, "name_entry", name_entry)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all partitions are one, a partition's own figures say that nothing was stored."""
    monkeypatch.setattr(client, "STORED_SECONDS", 3.0)
    monkeypatch.setattr(client, "IMPATIENT_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (everything_is_one_tenants, "state of another partition"),
        (state_is_shared, "state of another partition"),
        (everybody_is_the_operator, "/metrics is open"),
        (everybody_is_the_operator, "present content"),
        (budgets_are_not_divided, "evicted"),
        (ids_tell_the_content, "not stored because another partition"),
        (names_are_ids_of_the_text, "the same id"),
        (names_are_shared, "bears the owner's name"),
    ],
)
def test_probing_finds(scene: Scenes, monkeypatch: pytest.MonkeyPatch, plant: Any, says: str) -> None:
    plant(monkeypatch)
    result = Probing().run(scene())
    assert result.verdict == "broken"
    assert says in " ".join(result.findings)


def test_the_parts_of_the_process_are_not_shared(scene: Scenes) -> None:
    result = SharedParts().run(scene())
    assert result.verdict == "held", result.reason
    assert set(result.figures.values()) == {"held"}


@pytest.mark.parametrize(
    ("attack", "build", "crossed"),
    [
        (SharedParts(), sharing, {"named donors"}),
        (SharedParts(registry=SharingRegistry), None, {"encoder outputs"}),
        (SharedParts(store=one_budget), None, {"budgets"}),
    ],
)
def test_shared_parts_are_found(scene: Scenes, attack: SharedParts, build: Any, crossed: set[str]) -> None:
    result = attack.run(scene(**({"build": build} if build else {})))
    assert result.verdict == "broken"
    assert {name for name, figure in result.figures.items() if figure == "crossed"} == crossed


def test_a_shared_order_of_parts_is_found(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    known = pipeline.arranged
    monkeypatch.setattr(
        pipeline, "arranged", lambda frame, prefixes, tokenize, _: known(frame, prefixes, tokenize, "shared")
    )
    result = SharedParts().run(scene(build=sharing))
    assert result.figures["part order"] == "crossed"


def test_shared_fusion_states_are_found(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    from dejakv.fusing import Fusing

    found = Fusing._of
    monkeypatch.setattr(
        Fusing, "_of",
        lambda self, asked: found(self, replace(asked, request=replace(asked.request, partition="shared"))),
    )  # fmt: skip
    result = SharedParts().run(scene())
    assert result.figures["fusion states"] == "crossed"


def test_times_tell_a_partition_what_it_has_and_another_nothing(scene: Scenes) -> None:
    result = Timing().run(scene())
    within = result.figures["within a partition (AUC)"]
    assert isinstance(within, Estimate)
    assert within.value > 0.7
    assert isinstance(result.figures["across partitions (AUC)"], Estimate)


def test_times_that_tell_across_partitions_are_found(scene: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "build_cache", sharing)
    result = Timing().run(scene())
    assert result.verdict == "broken"
    assert "AUC" in result.reason

"""Scenes: everything fits, nothing overlaps, and a crowd is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.datasets.shapes_scene import CELL, DIAMETERS, SIDE, Scene, alter, make_scene, relations
from dejakv.errors import DatasetError

SEEDS = st.integers(0, 10**6)


@given(SEEDS, st.integers(1, 16))
def test_things_lie_inside_their_own_cells(seed: int, count: int) -> None:
    scene = make_scene(random.Random(seed), count)
    assert len({(t.column, t.row) for t in scene.things}) == count
    for t in scene.things:
        assert t.column * CELL <= t.x <= (t.column + 1) * CELL - t.diameter
        assert t.row * CELL <= t.y <= (t.row + 1) * CELL - t.diameter
        assert t.diameter in DIAMETERS[t.size]
        assert t.x + t.diameter <= SIDE


@pytest.mark.parametrize("count", [0, -1, 17, 400])
def test_a_crowded_or_empty_scene_is_refused_with_a_remedy(count: int) -> None:
    with pytest.raises(DatasetError, match="ask for fewer things"):
        make_scene(random.Random(0), count)


@given(SEEDS)
def test_relations_are_each_others_opposites(seed: int) -> None:
    one, other = make_scene(random.Random(seed), 2).things
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    assert [opposite[r] for r in relations(one, other)] == relations(other, one)
    assert relations(one, one) == []


def _looks(scene: Scene) -> list[tuple[str, str, str, int, int]]:
    return [(t.shape, t.color, t.size, t.column, t.row) for t in scene.things]


@given(SEEDS, st.sampled_from(["color", "shape", "size"]))
def test_a_near_duplicate_differs_in_one_attribute_of_one_thing(seed: int, attribute: str) -> None:
    rng = random.Random(seed)
    scene = make_scene(rng, 4)
    twin = alter(scene, rng, 2, attribute)
    different = [(a, b) for a, b in zip(_looks(scene), _looks(twin), strict=True) if a != b]
    assert len(different) == 1
    assert sum(x != y for x, y in zip(*different[0], strict=True)) == 1
    changed = twin.things[2]
    assert changed.column * CELL <= changed.x <= (changed.column + 1) * CELL - changed.diameter
    assert changed.row * CELL <= changed.y <= (changed.row + 1) * CELL - changed.diameter

"""Pictures: what the scene says is what the pixels show."""

import io
import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from dejakv.datasets.shapes_render import RGB, png, render
from dejakv.datasets.shapes_scene import COLORS, SHAPES, SIDE, Scene, Thing, make_scene


def _one(shape: str = "cube", color: str = "red", size: str = "large") -> Scene:
    return Scene((Thing(shape, color, size, 1, 1, 17.5, 17.25, 14 if size == "large" else 8),), noise=5)


def test_the_same_scene_gives_the_same_pixels() -> None:
    scene = make_scene(random.Random(1), 5)
    assert np.array_equal(render(scene), render(scene))
    assert render(scene).shape == (SIDE, SIDE, 3)
    assert not np.array_equal(render(scene), render(replace(scene, noise=scene.noise + 1)))


@pytest.mark.parametrize("color", COLORS)
def test_a_thing_has_its_color(color: str) -> None:
    inside = render(_one(color=color))[21:28, 21:28].reshape(-1, 3).mean(axis=0)
    nearest = min(RGB, key=lambda name: float(np.abs(np.asarray(RGB[name]) - inside).sum()))
    assert nearest == color


def _ink(scene: Scene) -> np.ndarray:
    empty = render(Scene((), noise=scene.noise)).astype(int)
    return np.abs(render(scene).astype(int) - empty).sum(axis=2)


def test_edges_are_soft() -> None:
    ink = _ink(_one("ball"))
    full = np.median(ink[22:27, 22:27])
    assert ((ink > 0.15 * full) & (ink < 0.85 * full)).sum() >= 10


def test_nothing_is_drawn_outside_the_things_box() -> None:
    ink = _ink(_one("cube"))
    ink[17:32, 17:33] = 0
    assert ink.max() == 0


def test_shapes_and_sizes_can_be_told_apart() -> None:
    seen = {(s, z): _ink(_one(s, size=z)) for s in SHAPES for z in ("small", "large")}
    keys = list(seen)
    for i, a in enumerate(keys):
        for b in keys[i + 1 :]:
            assert np.abs(seen[a] - seen[b]).sum() > 2000, (a, b)


def test_png_keeps_the_pixels_and_another_compression_gives_other_bytes() -> None:
    pixels = render(make_scene(random.Random(2), 4))
    one, other = png(pixels, 6), png(pixels, 1)
    assert one != other
    for data in (one, other):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)

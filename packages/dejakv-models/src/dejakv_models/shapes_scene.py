"""Scenes of simple things on a grid, the truth of pictures and questions, and their drawing."""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dejakv.errors import DatasetError

SIDE = 64
"""Width and height of a picture, in pixels."""
GRID = 4
"""Cells along each side.

A cell holds at most one thing, so nothing is hidden behind something else.
"""
CELL = SIDE // GRID

SHAPES = ("ball", "cube", "cone", "ring", "cross")
COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "gray", "pink")
SIZES = ("small", "large")
DIAMETERS = {"small": (8, 9), "large": (13, 14)}
"""Pixels across, by size name. The gap between the two lets a size be named."""
MAX_THINGS = 6
"""Most things in a generated scene (`count` answers with one of the digits 0 to 6)."""


@dataclass(frozen=True)
class Thing:
    """One thing of a scene.

    Attributes
    ----------
    shape, color, size : str
        What it is.
    column, row : int
        Its cell, from the left and from the top.
    x, y : float
        Top left corner of its box, pixels (quarter pixels occur).
    diameter : int
        Side of its box, pixels.
    tint : tuple[int, int, int]
        Added to its colour's red, green and blue.
    """

    shape: str
    color: str
    size: str
    column: int
    row: int
    x: float
    y: float
    diameter: int
    tint: tuple[int, int, int] = (0, 0, 0)

    def value(self, attribute: str) -> str:
        """Return its `shape`, `color` or `size`."""
        return str(getattr(self, attribute))


@dataclass(frozen=True)
class Scene:
    """Content of a picture; `noise` seeds the grain and the shade of the background."""

    things: tuple[Thing, ...]
    noise: int = 0


def relations(one: Thing, other: Thing) -> list[str]:
    """Tell where `one` is relative to `other`: of `left`, `right`, `above`, `below`.

    A shared column or row gives none.
    """
    names: list[str] = []
    if one.column != other.column:
        names.append("left" if one.column < other.column else "right")
    if one.row != other.row:
        names.append("above" if one.row < other.row else "below")
    return names


def make_scene(rng: random.Random, things: int) -> Scene:
    """Make a random scene with that many things; a DatasetError tells that they do not fit."""
    if not 0 < things <= GRID * GRID:
        raise DatasetError(
            f"a scene of {things} things cannot be drawn: the {GRID}x{GRID} grid has room for 1 to"
            f" {GRID * GRID}: ask for fewer things"
        )
    cells = rng.sample(range(GRID * GRID), things)
    # Half of the scenes draw from three colours only: with eight, two things would rarely share
    # one.
    palette = rng.sample(COLORS, 3) if rng.random() < 0.5 else COLORS
    return Scene(
        tuple(make_thing(rng, c % GRID, c // GRID, palette) for c in cells), rng.randrange(1 << 30)
    )


def make_thing(rng: random.Random, column: int, row: int, colors: Sequence[str] = COLORS) -> Thing:
    """Make a random thing somewhere inside its cell, in one of the colours."""
    size = rng.choice(SIZES)
    diameter = rng.choice(DIAMETERS[size])
    slack = (CELL - diameter) * 4
    return Thing(
        shape=rng.choice(SHAPES),
        color=rng.choice(colors),
        size=size,
        column=column,
        row=row,
        x=column * CELL + rng.randint(0, slack) / 4,
        y=row * CELL + rng.randint(0, slack) / 4,
        diameter=diameter,
        tint=(rng.randint(-10, 10), rng.randint(-10, 10), rng.randint(-10, 10)),
    )


def alter(scene: Scene, rng: random.Random, index: int, attribute: str) -> Scene:
    """Return the same scene except for one attribute of one thing: a near-duplicate.

    The attribute is `color`, `shape` or `size`.
    """
    old = scene.things[index]
    choices = {"color": COLORS, "shape": SHAPES, "size": SIZES}[attribute]
    value = rng.choice([c for c in choices if c != old.value(attribute)])
    if attribute == "size":
        diameter = DIAMETERS[value][0]
        centre_x, centre_y = old.x + old.diameter / 2, old.y + old.diameter / 2
        low_x, low_y = old.column * CELL, old.row * CELL
        x = min(max(round(4 * (centre_x - diameter / 2)) / 4, low_x), low_x + CELL - diameter)
        y = min(max(round(4 * (centre_y - diameter / 2)) / 4, low_y), low_y + CELL - diameter)
        new = replace(old, size=value, diameter=diameter, x=x, y=y)
    elif attribute == "color":
        new = replace(old, color=value)
    else:
        new = replace(old, shape=value)
    return replace(scene, things=(*scene.things[:index], new, *scene.things[index + 1 :]))


RGB = {
    "red": (214, 40, 40),
    "green": (44, 165, 66),
    "blue": (48, 84, 222),
    "yellow": (232, 208, 40),
    "purple": (138, 48, 180),
    "orange": (240, 134, 28),
    "gray": (122, 122, 122),
    "pink": (246, 140, 190),
}
_FINE = 8  # sub-samples along each side of a pixel
_GRAIN = 4.0  # standard deviation of the noise, in grey levels


def render(scene: Scene) -> npt.NDArray[np.uint8]:
    """Draw the picture: array (SIDE, SIDE, 3) of 8-bit RGB.

    The same scene always gives the same pixels.
    """
    noise = np.random.default_rng(scene.noise)
    ground = 236.0 + noise.integers(-6, 7)
    picture = np.full((SIDE, SIDE, 3), ground, dtype=np.float32)
    for thing in scene.things:
        left, top = int(thing.x), int(thing.y)
        cover = _cover(
            thing.shape, thing.diameter, int(4 * (thing.x - left)), int(4 * (thing.y - top))
        )
        high, wide = cover.shape
        patch = picture[top : top + high, left : left + wide]
        alpha = cover[: patch.shape[0], : patch.shape[1], None]
        color = np.asarray(RGB[thing.color], np.float32) + np.asarray(thing.tint, np.float32)
        patch += alpha * (color - patch)
    picture += noise.standard_normal((SIDE, SIDE, 1), dtype=np.float32) * _GRAIN
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def png(pixels: npt.NDArray[np.uint8], compression: int = 6) -> bytes:
    """Return the picture as PNG bytes.

    Another compression level (0-9) gives other bytes for the same pixels.
    """
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG", compress_level=compression)
    return out.getvalue()


@lru_cache(maxsize=1024)
def _cover(shape: str, diameter: int, quarter_x: int, quarter_y: int) -> npt.NDArray[np.float32]:
    """Return the share of each pixel that the shape covers, 0 to 1.

    Its box is moved right and down by quarters of a pixel.
    """
    side = diameter + 1
    at = (np.arange(side * _FINE) + 0.5) / _FINE
    radius = diameter / 2
    x = (at[None, :] - quarter_x / 4 - radius) / radius
    y = (at[:, None] - quarter_y / 4 - radius) / radius
    inside = _inside(shape, x, y) & (np.abs(x) <= 1) & (np.abs(y) <= 1)
    cover = inside.reshape(side, _FINE, side, _FINE).mean(axis=(1, 3), dtype=np.float32)
    cover.setflags(write=False)
    return cover


def _inside(
    shape: str, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Tell which points of the box [-1, 1] x [-1, 1] (y downwards) belong to the shape."""
    distance = np.hypot(x, y)
    if shape == "ball":
        return distance <= 1
    if shape == "cube":
        return np.maximum(np.abs(x), np.abs(y)) <= 0.92
    if shape == "cone":
        return np.abs(x) <= (y + 1) / 2
    if shape == "ring":
        return (distance <= 1) & (distance > 0.52)
    return np.minimum(np.abs(x), np.abs(y)) <= 0.3  # cross

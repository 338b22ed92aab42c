"""Scenes of simple things on a grid: the ground truth of pictures and questions."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dejakv.errors import DatasetError

SIDE = 64
"""Width and height of a picture, in pixels."""
GRID = 4
"""Cells along each side. A cell holds at most one thing, so nothing is hidden behind something else."""
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

    column, row  its cell, from the left and from the top
    x, y         top left corner of its box, pixels (quarter pixels occur)
    tint         added to its colour's red, green and blue
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
        """Its `shape`, `color` or `size`."""
        return str(getattr(self, attribute))


@dataclass(frozen=True)
class Scene:
    """A picture's content. `noise` seeds the grain and the shade of the background."""

    things: tuple[Thing, ...]
    noise: int = 0


def relations(one: Thing, other: Thing) -> list[str]:
    """Position of `one` relative to `other`: of `left`, `right`, `above`, `below`; none for a shared column or row."""
    names: list[str] = []
    if one.column != other.column:
        names.append("left" if one.column < other.column else "right")
    if one.row != other.row:
        names.append("above" if one.row < other.row else "below")
    return names


def make_scene(rng: random.Random, things: int) -> Scene:
    """A random scene with that many things. Raises DatasetError if they do not fit the grid."""
    if not 0 < things <= GRID * GRID:
        raise DatasetError(
            f"a scene of {things} things cannot be drawn: the {GRID}x{GRID} grid has room for 1 to {GRID * GRID}: "
            "ask for fewer things"
        )
    cells = rng.sample(range(GRID * GRID), things)
    # Half of the scenes draw from three colours only: with eight, two things would rarely share one.
    palette = rng.sample(COLORS, 3) if rng.random() < 0.5 else COLORS
    return Scene(tuple(make_thing(rng, c % GRID, c // GRID, palette) for c in cells), rng.randrange(1 << 30))


def make_thing(rng: random.Random, column: int, row: int, colors: Sequence[str] = COLORS) -> Thing:
    """A random thing somewhere inside its cell, in one of the colours."""
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
    """The same scene except for one attribute (`color`, `shape` or `size`) of one thing: a near-duplicate."""
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

"""Draws a scene: anti-aliased things on a light, slightly grainy ground, as pixels and as PNG."""

import io
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dejakv.datasets.shapes_scene import SIDE, Scene

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
    """The picture: array (SIDE, SIDE, 3) of 8-bit RGB. The same scene always gives the same pixels."""
    noise = np.random.default_rng(scene.noise)
    ground = 236.0 + noise.integers(-6, 7)
    picture = np.full((SIDE, SIDE, 3), ground, dtype=np.float32)
    for thing in scene.things:
        left, top = int(thing.x), int(thing.y)
        cover = _cover(thing.shape, thing.diameter, int(4 * (thing.x - left)), int(4 * (thing.y - top)))
        high, wide = cover.shape
        patch = picture[top : top + high, left : left + wide]
        alpha = cover[: patch.shape[0], : patch.shape[1], None]
        color = np.asarray(RGB[thing.color], np.float32) + np.asarray(thing.tint, np.float32)
        patch += alpha * (color - patch)
    picture += noise.standard_normal((SIDE, SIDE, 1), dtype=np.float32) * _GRAIN
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def png(pixels: npt.NDArray[np.uint8], compression: int = 6) -> bytes:
    """The picture as PNG bytes. Another compression level (0-9) gives other bytes for the same pixels."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG", compress_level=compression)
    return out.getvalue()


@lru_cache(maxsize=1024)
def _cover(shape: str, diameter: int, quarter_x: int, quarter_y: int) -> npt.NDArray[np.float32]:
    """Share of each pixel that the shape covers, 0 to 1, its box moved right and down by quarters of a pixel."""
    side = diameter + 1
    at = (np.arange(side * _FINE) + 0.5) / _FINE
    radius = diameter / 2
    x = (at[None, :] - quarter_x / 4 - radius) / radius
    y = (at[:, None] - quarter_y / 4 - radius) / radius
    inside = _inside(shape, x, y) & (np.abs(x) <= 1) & (np.abs(y) <= 1)
    cover = inside.reshape(side, _FINE, side, _FINE).mean(axis=(1, 3), dtype=np.float32)
    cover.setflags(write=False)
    return cover


def _inside(shape: str, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which points of the box [-1, 1] x [-1, 1] (y downwards) belong to the shape."""
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

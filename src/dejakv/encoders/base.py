"""The seams of encoders: a text or a picture in, a unit vector out."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dejakv.request import DEFAULT_PARTITION, Media

Vector = NDArray[np.float32]


class TextEncoder(Protocol):
    """Thread-safe. `fingerprint` covers everything that its vectors depend on: vectors of two encoders are
    comparable only if it is equal, so it is stored with them."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def encode(self, text: str) -> Vector:
        """`[dim]` float32 of length 1. Raises InputError for a text without a direction."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[Vector]: ...


class ImageEncoder(Protocol):
    """As `TextEncoder`, for pictures."""

    @property
    def fingerprint(self) -> str: ...

    def encode(self, media: Media, partition: str = DEFAULT_PARTITION) -> Vector:
        """`[dim]` float32 of length 1. Raises InputError for data that is not a picture.

        Vectors of pictures are remembered only within their partition.
        """
        ...


@runtime_checkable
class Closes(Protocol):
    """An encoder, a level over one or an engine that holds what must be ended."""

    def close(self) -> None: ...


def without_encoder(setting: str) -> str:
    """The remedy for an encoder that cannot be loaded."""
    return f'; or set {setting}="model" (--{setting.replace("_", "-")} model), which needs no download'

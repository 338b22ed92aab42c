"""The model's tower behind the encoder registry.

A picture known by its digest does not run it again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cachetools import LRUCache
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dejakv.engines.base import Prepared
from dejakv.engines.transformers.prompts import (
    PictureBook,
    image_token_of,
    positions,
    run_tower,
    vision_base,
)
from dejakv.errors import InputError, ModelError
from dejakv.identity import MediumSpan
from dejakv.request import Media, current_retention, request_scratch


class ReadyFeatures(BaseModelOutputWithPooling):
    """The result of `get_image_features`, made from rows computed before."""


@dataclass(frozen=True)
class ImageRows:
    """Encoder rows for the image tokens of a run, in order of the images.

    Attributes
    ----------
    parts : tuple[Tensor, ...]
        One tensor an image: `[rows, hidden]`, or `[1 + layers, rows, hidden]` with deepstack rows.
    whole : bool
        Whether the model gets them as one tensor instead of a list.
    """

    parts: tuple[torch.Tensor, ...]
    whole: bool

    def divided(self, pictures: int) -> "tuple[ImageRows, ImageRows]":
        """Return the rows of the first `pictures`, and those of the others."""
        return replace(self, parts=self.parts[:pictures]), replace(
            self, parts=self.parts[pictures:]
        )

    def output(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the rows as the model's forward expects them from `get_image_features`."""
        parts = [part.to(device, dtype) for part in self.parts]
        deep = [part[1:] for part in parts if part.dim() == 3]
        flat = [part[0] if part.dim() == 3 else part for part in parts]

        out: Any = ReadyFeatures(pooler_output=torch.cat(flat)[None] if self.whole else flat)  # pyright: ignore
        if deep:
            out.deepstack_features = [
                [part[layer] for part in deep] for layer in range(deep[0].shape[0])
            ]
        return out


def rows_from(token_ids: Sequence[int], span: MediumSpan, start: int, image_token: int) -> int:
    """Count a picture's rows before token `start`, which are in the reused state already."""
    return sum(
        token == image_token
        for token in token_ids[span.start : min(start, span.start + span.length)]
    )


@contextmanager
def feature_override(base: Any, rows: ImageRows | None) -> Iterator[dict[str, Any]]:
    """Let one model object answer `get_image_features` with the rows, within the context.

    Yields the arguments that make a forward or `generate` ask for them. No class is touched, and
    the override is gone afterwards whatever happens.
    """
    if rows is None or not rows.parts:
        yield {}
        return

    device, dtype = base.device, base.dtype

    def get_image_features(pixel_values: Any = None, *_: Any, **__: Any) -> Any:
        return rows.output(device, dtype)

    # Past `__setattr__`, which would note it as a change of the model.
    base.__dict__["get_image_features"] = get_image_features
    try:
        # One number, only to make the forward ask for features.
        yield {"pixel_values": torch.zeros(1, device=device, dtype=dtype)}
    finally:
        base.__dict__.pop("get_image_features", None)


_PARTITIONS = 256


@dataclass
class VisionModel:
    """Pictures for one model. One request uses it at a time.

    Attributes
    ----------
    base : Module
        The module whose `get_image_features` the model asks.
    book : PictureBook
        An empty book, from which each partition's is made.
    registry : VisualKVCache or None
        Registry of the tower's outputs.
    epoch : str
        Fingerprint of tower, projector and processor. Empty: nothing is taken from the registry or
        put into it.
    whole : bool or None
        Whether the model hands features over as one tensor; None until the tower ran once.
    uncounted : int
        Runs made outside of a request (embeddings for the lookup), counted with the next one.
    runs : int
        Runs of the tower since the last `take_runs`.
    books : LRUCache[str, PictureBook]
        Each partition's pictures, so that nobody's timing shows what others sent.
    """

    base: Any
    book: PictureBook
    registry: Any = None
    epoch: str = ""
    whole: bool | None = None
    uncounted: int = 0
    runs: int = 0
    books: LRUCache[str, PictureBook] = field(default_factory=lambda: LRUCache(_PARTITIONS))

    @classmethod
    def of(cls, model: Any, processor: Any, registry: Any) -> "VisionModel":
        """Build the vision side of a model.

        Raises
        ------
        ModelError
            The model has no `get_image_features` or no image token.
        """
        base, token = vision_base(model), image_token_of(model, processor)
        if base is None or token is None:
            missing = "get_image_features" if base is None else "an image token"
            raise ModelError(
                f"{type(model).__name__} has no {missing}: choose an image-text model of "
                "transformers 5"
            )
        return cls(base, PictureBook(processor, *token), registry)

    def book_of(self, partition: str) -> PictureBook:
        """Return the pictures of one partition; those of the latest partitions are kept.

        A request of which nothing is stored has a book for itself.
        """
        if current_retention().no_store:
            return request_scratch((id(self), partition), self.book.empty)
        book = self.books.get(partition)
        if book is None:
            book = self.books[partition] = self.book.empty()
        return book

    def rows(self, prepared: Prepared, start: int) -> tuple[ImageRows | None, int]:
        """Return the encoder's rows of the image tokens from `start` on, and the tower's runs.

        Pictures that end before `start` are not looked up.

        Returns
        -------
        tuple[ImageRows or None, int]
            The rows, None if no picture reaches beyond `start`; and the runs since the last call,
            with those made for the lookup's embeddings.

        Raises
        ------
        InputError
            If a picture's rows are not stored, and its pixels are not at hand.
        """
        media = {item.digest: item for item in prepared.request.media}
        parts: list[torch.Tensor] = []
        for span in prepared.spans:
            if span.start + span.length <= start:
                continue
            before = rows_from(prepared.token_ids, span, start, self.book.image_token_id or 0)
            medium, partition = media.get(span.digest), prepared.request.partition
            features = (
                self._compute(medium, span.digest, partition)
                if prepared.request.no_cache
                else self.features(medium, partition, span.digest)
            )
            parts.append(features[..., before:, :])

        runs = self.take_runs() + self.uncounted
        self.uncounted = 0

        if not parts:
            return None, runs
        return ImageRows(tuple(parts), bool(self.whole)), runs

    def features(self, media: Media | None, partition: str, digest: str = "") -> torch.Tensor:
        """Return a picture's rows, from the registry or the tower.

        Raises
        ------
        InputError
            Neither can give them.
        """
        digest = digest or (media.digest if media is not None else "")
        # How the model hands features over is known once its tower ran.
        if self.whole is None or self.registry is None or not self.epoch:
            features = self._compute(media, digest, partition)
            if self.registry is not None and self.epoch:
                self.registry.view(self.epoch, partition).store(digest, "image", features)
            return features

        view = self.registry.view(self.epoch, partition)
        return _as_tensor(
            view.get_or_compute(digest, "image", lambda: self._compute(media, digest, partition))
        )

    def positions(self, ids: torch.Tensor, prepared: Prepared) -> torch.Tensor | None:
        """Return the positions of a whole prompt; see `prompts.positions`."""
        book = self.book_of(prepared.request.partition)
        # A picture whose rows were stored was never processed here, and its grid is needed.
        for item in prepared.request.media:
            book.get(item)
        return positions(self.base, ids, self.book.image_token_id, prepared.spans, book)

    def set_epoch(self, epoch: str) -> None:
        """Forget all pictures if tower or processor have another fingerprint."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.books.clear()

    def forget(self, partition: str | None) -> None:
        """Forget the pictures of a partition, or of all (None)."""
        if partition is None:
            self.books.clear()
        else:
            self.books.pop(partition, None)

    def take_runs(self) -> int:
        """Return the runs of the tower since the last call."""
        runs, self.runs = self.runs, 0
        return runs

    def _compute(self, media: Media | None, digest: str, partition: str) -> torch.Tensor:
        book = self.book_of(partition)
        pixels = book.pixels(media) if media is not None else book.cached_pixels(digest)
        picture = book.lookup_digest(digest)
        if pixels is None or picture is None:
            raise InputError(
                "a picture in the prompt is not among the request's media: give its bytes with the "
                "request"
            )

        features, self.whole = run_tower(self.base, pixels, picture.rows)
        self.runs += 1
        return features


def _as_tensor(embedding: Any) -> torch.Tensor:
    return embedding if isinstance(embedding, torch.Tensor) else torch.from_numpy(embedding)

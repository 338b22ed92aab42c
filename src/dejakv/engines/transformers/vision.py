"""The model's tower behind the encoder registry: a picture known by its digest does not run it again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cachetools import LRUCache
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dejakv.engines.base import Prepared
from dejakv.engines.transformers.prompts import PictureBook, image_token_of, positions, run_tower, vision_base
from dejakv.errors import InputError, ModelError
from dejakv.identity import MediumSpan
from dejakv.request import Media, for_this_request, nothing_is_kept


class ReadyFeatures(BaseModelOutputWithPooling):
    """The result of `get_image_features`, made from rows computed before."""


@dataclass(frozen=True)
class ImageRows:
    """Encoder rows for the image tokens of a run, in order of the images.

    parts  one tensor an image: `[rows, hidden]`, or `[1 + layers, rows, hidden]` with deepstack rows
    whole  hand them to the model as one tensor instead of a list
    """

    parts: tuple[torch.Tensor, ...]
    whole: bool

    def divided(self, pictures: int) -> "tuple[ImageRows, ImageRows]":
        """The rows of the first `pictures`, and of the others."""
        return replace(self, parts=self.parts[:pictures]), replace(self, parts=self.parts[pictures:])

    def output(self, device: torch.device, dtype: torch.dtype) -> Any:
        parts = [part.to(device, dtype) for part in self.parts]
        deep = [part[1:] for part in parts if part.dim() == 3]
        flat = [part[0] if part.dim() == 3 else part for part in parts]
        out: Any = ReadyFeatures(pooler_output=torch.cat(flat)[None] if self.whole else flat)  # pyright: ignore
        if deep:
            out.deepstack_features = [[part[layer] for part in deep] for layer in range(deep[0].shape[0])]
        return out


def rows_from(token_ids: Sequence[int], span: MediumSpan, start: int, image_token: int) -> int:
    """How many of a picture's rows lie before token `start`: those are in the reused state already."""
    return sum(token == image_token for token in token_ids[span.start : min(start, span.start + span.length)])


@contextmanager
def given_features(base: Any, rows: ImageRows | None) -> Iterator[dict[str, Any]]:
    """While it lasts, this one model object answers `get_image_features` with the rows. Yields the arguments that make
    a forward or `generate` ask for them. No class is touched, and the override is gone afterwards whatever happens."""
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

    base       the module whose `get_image_features` the model asks
    registry   a `VisualKVCache` or None
    epoch      fingerprint of tower, projector and processor; empty: nothing is taken from the registry or put into it
    whole      whether the model hands features over as one tensor; None until the tower ran once
    books      each partition's own pictures, so that nobody's timing shows what others sent
    uncounted  runs made outside of a request (embeddings for the lookup), counted with the next one
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
        """Build the vision side of a model. Raises: ModelError without `get_image_features` or an image token."""
        base, token = vision_base(model), image_token_of(model, processor)
        if base is None or token is None:
            missing = "get_image_features" if base is None else "an image token"
            raise ModelError(f"{type(model).__name__} has no {missing}: choose an image-text model of transformers 5")
        return cls(base, PictureBook(processor, *token), registry)

    def book_of(self, partition: str) -> PictureBook:
        """The pictures of one partition; those of the latest partitions are kept. A request of which nothing is kept has a book
        of its own."""
        if nothing_is_kept():
            return for_this_request((id(self), partition), self.book.empty)
        book = self.books.get(partition)
        if book is None:
            book = self.books[partition] = self.book.empty()
        return book

    def rows(self, prepared: Prepared, start: int) -> tuple[ImageRows | None, int]:
        """Rows of all image tokens from `start` on (None without any), and the number of pictures run through the tower for them. Pictures
        before `start` are not looked up."""
        media = {item.digest: item for item in prepared.request.media}
        parts: list[torch.Tensor] = []
        for span in prepared.spans:
            if span.start + span.length <= start:
                continue
            before = rows_from(prepared.token_ids, span, start, self.book.image_token_id or 0)
            features = self.features(media.get(span.digest), prepared.request.partition, span.digest)
            parts.append(features[..., before:, :])

        runs = self.take_runs() + self.uncounted
        self.uncounted = 0

        if not parts:
            return None, runs
        return ImageRows(tuple(parts), bool(self.whole)), runs

    def features(self, media: Media | None, partition: str, digest: str = "") -> torch.Tensor:
        """A picture's rows, from the registry or the tower. Raises: InputError if neither can give them."""
        digest = digest or (media.digest if media is not None else "")
        # How the model hands features over is known once its tower ran.
        if self.whole is None or self.registry is None or not self.epoch:
            features = self._compute(media, digest, partition)
            if self.registry is not None and self.epoch:
                self.registry.view(self.epoch, partition).store(digest, "image", features)
            return features

        view = self.registry.view(self.epoch, partition)
        return _as_tensor(view.get_or_compute(digest, "image", lambda: self._compute(media, digest, partition)))

    def positions(self, ids: torch.Tensor, prepared: Prepared) -> torch.Tensor | None:
        """See `prompts.positions`."""
        book = self.book_of(prepared.request.partition)
        # A picture whose rows were stored was never processed here, and its grid is needed.
        for item in prepared.request.media:
            book.get(item)
        return positions(self.base, ids, self.book.image_token_id, prepared.spans, book)

    def follow(self, epoch: str) -> None:
        """Process pictures again if tower or processor have another fingerprint."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.books.clear()

    def forget(self, partition: str | None) -> None:
        """Forgets one partition's pictures, or all."""
        if partition is None:
            self.books.clear()
        else:
            self.books.pop(partition, None)

    def take_runs(self) -> int:
        """Runs of the tower since the last call."""
        runs, self.runs = self.runs, 0
        return runs

    def _compute(self, media: Media | None, digest: str, partition: str) -> torch.Tensor:
        book = self.book_of(partition)
        pixels = book.pixels(media) if media is not None else book.held_pixels(digest)
        picture = book.known(digest)
        if pixels is None or picture is None:
            raise InputError(
                "a picture in the prompt is not among the request's media: give its bytes with the request"
            )

        features, self.whole = run_tower(self.base, pixels, picture.rows)
        self.runs += 1
        return features


def _as_tensor(embedding: Any) -> torch.Tensor:
    return embedding if isinstance(embedding, torch.Tensor) else torch.from_numpy(embedding)

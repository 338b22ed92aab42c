"""The tower's rows put into a run without running the tower: the model asks for image features, and is given these."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dejakv.identity import Span


class ReadyFeatures(BaseModelOutputWithPooling):
    """What `get_image_features` returns, made from rows that were computed before."""


@dataclass(frozen=True)
class ImageRows:
    """Rows for the image tokens that a run computes, in order; `[rows, hidden]` or `[1 + layers, rows, hidden]` each.

    whole  the model wants one tensor, not a list
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


def rows_from(token_ids: Sequence[int], span: Span, start: int, image_token: int) -> int:
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

    base.__dict__["get_image_features"] = get_image_features
    try:
        yield {"pixel_values": torch.zeros(1, device=device, dtype=dtype)}
    finally:
        base.__dict__.pop("get_image_features", None)

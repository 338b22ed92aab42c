"""From text and pictures to token ids with every picture's tokens in place, and where they stand."""

from collections.abc import Sequence
from typing import Any

import torch

from dejakv.engines.transformers.pictures import Picture, PictureBook
from dejakv.errors import InputError
from dejakv.identity import Span
from dejakv.pictures import decoded
from dejakv.request import Media


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids with the special tokens the tokenizer adds, unless a template put them into the text already."""
    bos = tokenizer.bos_token
    return list(tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"])


def image_text_ids(book: PictureBook, text: str, media: Sequence[Media]) -> tuple[list[int], tuple[Span, ...]]:
    """Token ids with pictures expanded as the model's processor does it, and each picture's span.

    Raises: InputError if placeholders and pictures do not match in number or a picture cannot be read.
    """
    tokenizer = book.processor.tokenizer
    held = text.count(book.image_token)
    if held != len(media):
        raise InputError(
            f"the prompt has {held} placeholders {book.image_token!r} for {len(media)} pictures: "
            f"put one {book.image_token!r} into the prompt for each picture, in order"
        )
    pictures = [book.get(item) for item in media]
    if all(picture.expansion for picture in pictures):
        pieces = text.split(book.image_token)
        expanded = (
            "".join(piece + picture.expansion for piece, picture in zip(pieces, pictures, strict=False)) + pieces[-1]
        )
        ids = text_ids(tokenizer, expanded)
    else:
        out = book.processor(text=[text], images=[decoded(item) for item in media], return_tensors="pt")
        ids = out["input_ids"][0].tolist()
    return ids, spans_of(ids, book.image_token_id, pictures, [item.digest for item in media])


def spans_of(
    ids: Sequence[int], image_token: int | None, pictures: Sequence[Picture], digests: Sequence[str]
) -> tuple[Span, ...]:
    """Where each picture's tokens stand. Raises: InputError if the prompt holds another number of image tokens."""
    places = [index for index, token in enumerate(ids) if token == image_token]
    if len(places) != sum(picture.rows for picture in pictures):
        raise InputError(
            f"the prompt holds {len(places)} image tokens, its pictures need {sum(picture.rows for picture in pictures)}: "
            "give one placeholder for each picture and no other image tokens in the text"
        )
    spans: list[Span] = []
    for picture, digest in zip(pictures, digests, strict=True):
        mine, places = places[: picture.rows], places[picture.rows :]
        if mine:
            spans.append(Span(mine[0], mine[-1] - mine[0] + 1, digest))
    return tuple(spans)


def positions(
    base: Any,
    ids: torch.Tensor,
    image_token: int | None = None,
    spans: Sequence[Span] = (),
    book: PictureBook | None = None,
) -> torch.Tensor | None:
    """Positions of the whole prompt where they are not simply 0..n-1: `[4, 1, n]` for M-RoPE (text, time, height, width).

    They are made from the whole prompt, so that a run that starts from reused state has the positions it would have had.
    None where the model counts for itself. Raises: InputError for a picture whose size is not known.
    """
    if base is None or not hasattr(base, "get_rope_index"):
        return None
    text = torch.arange(ids.shape[1], device=ids.device)[None, None]
    if book is None or not spans:
        return text.expand(4, -1, -1)
    pictures = [book.known(span.digest) for span in spans]
    if any(picture is None or picture.grid is None for picture in pictures):
        raise InputError(
            "the donor's picture is not known to this process: give the picture with the request, or set media='exact'"
        )
    grids = torch.tensor([picture.grid for picture in pictures if picture is not None])
    kinds = (ids == image_token).int()
    three, _ = type(base).get_rope_index(base, ids, mm_token_type_ids=kinds, image_grid_thw=grids.to(ids.device))
    return torch.cat([text.to(three.dtype), three])


def check_length(context: int, tokens: int) -> None:
    """Raises InputError for a prompt without tokens, and for one that leaves no room for an answer."""
    if tokens == 0:
        raise InputError("the prompt has no tokens: give a question")
    if tokens >= context:
        raise InputError(
            f"the prompt has {tokens} tokens, the model's context {context} with room for an answer: "
            "shorten the prompt or choose a model with a longer context"
        )

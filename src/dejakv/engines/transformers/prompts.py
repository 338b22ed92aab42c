"""From text and pictures to token ids, spans and positions; pictures are known by their digest."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cachetools import FIFOCache, LRUCache
from torch import Tensor

from dejakv.engines.transformers.model_settings import setting
from dejakv.errors import InputError, ModelError
from dejakv.identity import MediumSpan
from dejakv.pictures import decode_picture
from dejakv.request import Media

_TEXT_KEYS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "num_patches",
    "num_crops",
}
_MAX_PICTURES = 100_000


@dataclass(frozen=True)
class PicturePrompt:
    """What a prompt must know of a picture, without its pixels.

    Attributes
    ----------
    rows : int
        Tokens of the picture in the prompt; as many rows has the tower's output.
    expansion : str
        Text that its placeholder becomes; empty if only the processor can expand it.
    grid : tuple[int, int, int] or None
        Time, height and width in patches, where positions depend on them (M-RoPE).
    """

    rows: int
    expansion: str = ""
    grid: tuple[int, int, int] | None = None


@dataclass
class PictureBook:
    """Knows every picture seen by digest, and keeps the pixels of the last `max_pixel_entries`.

    A picture is decoded and processed when it is first seen (its token count may depend on its
    size), and again only if the tower must run although its pixels are gone. One request uses it at
    a time.

    Attributes
    ----------
    image_token : str
        Placeholder of a picture in a prompt.
    image_token_id : int or None
        Id of the tokens that stand for the tower's rows.
    """

    processor: Any
    image_token: str = ""
    image_token_id: int | None = None
    max_pixel_entries: int = 4
    _by_digest: LRUCache[str, PicturePrompt] = field(
        default_factory=lambda: LRUCache(_MAX_PICTURES)
    )
    _pixels: FIFOCache[str, Mapping[str, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self._pixels = FIFOCache(self.max_pixel_entries)

    def empty(self) -> "PictureBook":
        """Return a book that knows no picture yet."""
        return PictureBook(
            self.processor, self.image_token, self.image_token_id, self.max_pixel_entries
        )

    def get(self, media: Media) -> PicturePrompt:
        """Look up a picture, which is decoded at first sight.

        Raises
        ------
        InputError
            The bytes are no readable picture.
        """
        picture = self._by_digest.get(media.digest)
        if picture is None:
            self.pixels(media)
            picture = self._by_digest[media.digest]
        return picture

    def lookup_digest(self, digest: str) -> PicturePrompt | None:
        """Return a picture that was seen, by its digest; None for an unknown one."""
        return self._by_digest.get(digest)

    def take(self, pictures: Sequence[tuple[Media, PicturePrompt, Mapping[str, Tensor]]]) -> None:
        """Add a prompt's pictures with pixels that were processed elsewhere.

        All of them are kept.
        """
        # Or this prompt's first pictures would be gone when the tower runs.
        if len(pictures) > self._pixels.maxsize:
            larger: FIFOCache[str, Mapping[str, Tensor]] = FIFOCache(len(pictures))
            larger.update(self._pixels)
            self._pixels = larger
        for item, picture, pixels in pictures:
            self._by_digest[item.digest] = picture
            self._pixels[item.digest] = pixels

    def pixels(self, media: Media) -> Mapping[str, Tensor]:
        """Return the processor's output for one picture.

        These are `pixel_values` and whatever else the tower takes.
        """
        processed = self._pixels.get(media.digest)
        if processed is None:
            self._process(media)
            processed = self._pixels[media.digest]
        return processed

    def cached_pixels(self, digest: str) -> Mapping[str, Tensor] | None:
        """Return a picture's pixels if they are still kept; None if not."""
        return self._pixels.get(digest)

    def _process(self, media: Media) -> None:
        image = decode_picture(media)
        try:
            out = self.processor(text=[self.image_token], images=[image], return_tensors="pt")
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise InputError(
                f"the processor refuses picture {media.name or media.digest[:12]} "
                f"({image.width}x{image.height}): {error}; "
                "give a picture of another size"
            ) from error

        ids = out["input_ids"][0].tolist()
        rows = ids.count(self.image_token_id)
        grid = out.get("image_grid_thw")
        picture = PicturePrompt(
            rows, self._expansion(ids), _grid(grid) if grid is not None else None
        )
        tower_inputs = {
            key: value
            for key, value in out.items()
            if key not in _TEXT_KEYS and isinstance(value, Tensor)
        }
        self._by_digest[media.digest], self._pixels[media.digest] = picture, tower_inputs

    def _expansion(self, ids: list[int]) -> str:
        """Return the expanded text, if no context changes its tokens.

        It then consists of the tokenizer's own added tokens alone; else it is empty.
        """
        tokenizer = self.processor.tokenizer
        added = tokenizer.get_added_vocab()
        tokens: list[str] = tokenizer.convert_ids_to_tokens(ids)
        outer = {tokenizer.bos_token, tokenizer.eos_token}

        while tokens and tokens[0] in outer:
            tokens.pop(0)
        while tokens and tokens[-1] in outer:
            tokens.pop()
        return "".join(tokens) if tokens and all(token in added for token in tokens) else ""


def _grid(sizes: Tensor) -> tuple[int, int, int]:
    time, height, width = (int(side) for side in sizes[0])
    return time, height, width


def image_token_of(model: Any, processor: Any) -> tuple[str, int] | None:
    """Return a picture's placeholder in a prompt, and the id of the tokens of the tower's rows.

    None if the model or its tokenizer has no such token.
    """
    token_id = setting(model.config, "image_token_id")
    token_id = setting(model.config, "image_token_index") if token_id is None else token_id
    tokenizer = getattr(processor, "tokenizer", None)
    if token_id is None or tokenizer is None:
        return None

    token = getattr(processor, "image_token", None)
    token = getattr(token, "content", token) or tokenizer.convert_ids_to_tokens(token_id)
    return (str(token), int(token_id)) if token else None


def vision_base(model: Any) -> Any:
    """Return the module whose `get_image_features` the model's forward calls; None without one."""
    candidates = (getattr(model, "base_model", None), getattr(model, "model", None), model)
    bases = [module for module in candidates if hasattr(module, "get_image_features")]
    # An inner module first: the model's own method only passes the call on.
    return next((module for module in bases if module is not model), bases[0] if bases else None)


def run_tower(base: Any, pixels: Mapping[str, Tensor], rows: int) -> tuple[Tensor, bool]:
    """Run one picture through tower and projector.

    Returns
    -------
    tuple[Tensor, bool]
        The picture's rows on the CPU, `[rows, hidden]`, or `[1 + layers, rows, hidden]` where the
        decoder takes features at several layers (deepstack: first the input rows, then one slice a
        layer); and whether the model hands its features over as one tensor instead of a list.

    Raises
    ------
    ModelError
        The tower gives another number of rows.
    """
    accepted = inspect.signature(type(base).get_image_features).parameters
    device, dtype = base.device, base.dtype
    inputs = {
        key: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for key, value in pixels.items()
        if key in accepted
    }

    with torch.inference_mode():
        # By the class: the object's own may answer with rows computed before.
        out = type(base).get_image_features(base, **inputs, return_dict=True)

    # Models give one tensor for all pictures, or a list of one tensor each.
    pooled = out.pooler_output
    whole = isinstance(pooled, Tensor)
    flat = (
        pooled.reshape(-1, pooled.shape[-1])
        if whole
        else torch.cat([part.reshape(-1, part.shape[-1]) for part in pooled])
    )
    if flat.shape[0] != rows:
        raise ModelError(
            f"{type(base).__name__} gives {flat.shape[0]} rows for a picture of {rows} tokens: "
            "this architecture's pictures "
            "are not supported"
        )

    deep = getattr(out, "deepstack_features", None)
    if deep is not None:
        layers = [part if isinstance(part, Tensor) else torch.cat(list(part)) for part in deep]
        flat = torch.stack([flat, *layers])
    return flat.cpu(), whole


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, with the special tokens that the tokenizer adds.

    They are left out where a template put them into the text already.
    """
    bos = tokenizer.bos_token
    return list(tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"])


def image_text_ids(
    book: PictureBook, text: str, media: Sequence[Media]
) -> tuple[list[int], tuple[MediumSpan, ...]]:
    """Return token ids with pictures expanded as the model's processor does it, and their spans.

    Raises
    ------
    InputError
        Placeholders and pictures do not match in number, or a picture cannot be read.
    """
    tokenizer = book.processor.tokenizer
    placeholders = text.count(book.image_token)
    if placeholders != len(media):
        raise InputError(
            f"the prompt has {placeholders} placeholders {book.image_token!r} for {len(media)} "
            "pictures: "
            f"put one {book.image_token!r} into the prompt for each picture, in order"
        )

    pictures = [book.get(item) for item in media]
    # Without the processor, which would decode every picture again.
    if all(picture.expansion for picture in pictures):
        pieces = text.split(book.image_token)
        expanded = (
            "".join(
                piece + picture.expansion for piece, picture in zip(pieces, pictures, strict=False)
            )
            + pieces[-1]
        )
        ids = text_ids(tokenizer, expanded)
    else:
        out = book.processor(
            text=[text], images=[decode_picture(item) for item in media], return_tensors="pt"
        )
        ids = out["input_ids"][0].tolist()

    return ids, spans_of(ids, book.image_token_id, pictures, [item.digest for item in media])


def spans_of(
    ids: Sequence[int],
    image_token: int | None,
    pictures: Sequence[PicturePrompt],
    digests: Sequence[str],
) -> tuple[MediumSpan, ...]:
    """Return where each picture's tokens stand.

    Raises
    ------
    InputError
        The prompt holds another number of image tokens.
    """
    places = [index for index, token in enumerate(ids) if token == image_token]
    if len(places) != sum(picture.rows for picture in pictures):
        raise InputError(
            f"the prompt holds {len(places)} image tokens, its pictures need "
            f"{sum(picture.rows for picture in pictures)}: "
            "give one placeholder for each picture and no other image tokens in the text"
        )

    spans: list[MediumSpan] = []
    for picture, digest in zip(pictures, digests, strict=True):
        picture_places, places = places[: picture.rows], places[picture.rows :]
        if picture_places:
            spans.append(
                MediumSpan(picture_places[0], picture_places[-1] - picture_places[0] + 1, digest)
            )
    return tuple(spans)


def positions(
    base: Any,
    ids: Tensor,
    image_token: int | None = None,
    spans: Sequence[MediumSpan] = (),
    book: PictureBook | None = None,
) -> Tensor | None:
    """Return a whole prompt's positions, for a model that remembers those of its last pictures.

    They are made from the whole prompt, so that a run that starts from reused state has the
    positions it would have had.

    Returns
    -------
    Tensor or None
        `[4, 1, n]` with pictures (text, time, height, width; M-RoPE), `[1, n]` without. None where
        the model counts for itself.

    Raises
    ------
    InputError
        The size of a picture is not known.
    """
    if base is None or not hasattr(base, "get_rope_index"):
        return None
    text = torch.arange(ids.shape[1], device=ids.device)[None]
    if book is None or not spans:
        return text

    pictures = [book.lookup_digest(span.digest) for span in spans]
    if any(picture is None or picture.grid is None for picture in pictures):
        raise InputError(
            "the donor's picture is not known to this process: give the picture with the request, "
            "or set media='exact'"
        )

    grids = torch.tensor([picture.grid for picture in pictures if picture is not None])
    kinds = (ids == image_token).int()
    three, _ = type(base).get_rope_index(
        base, ids, mm_token_type_ids=kinds, image_grid_thw=grids.to(ids.device)
    )
    return torch.cat([text[None].to(three.dtype), three])

"""A call of `generate` taken apart into single prompts, and its results put together again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dejakv.engines.transformers.pictures import Picture
from dejakv.request import Media


@dataclass(frozen=True)
class Row:
    """One prompt of a batch: its tokens without padding, its pictures with what the tower takes of each."""

    token_ids: tuple[int, ...]
    media: tuple[Media, ...] = ()
    pictures: tuple[Picture, ...] = ()
    pixels: tuple[Mapping[str, torch.Tensor], ...] = ()


def rows_of(arguments: Mapping[str, Any], image_token: int | None) -> list[Row]:
    """Single prompts. Raises: ValueError if pixels and image tokens do not fit."""
    ids: torch.Tensor = arguments["input_ids"]
    mask = arguments.get("attention_mask")
    prompts = [
        tuple(row[kept.bool()].tolist() if kept is not None else row.tolist())
        for row, kept in zip(ids, mask if mask is not None else [None] * ids.shape[0], strict=True)
    ]
    pixels = arguments.get("pixel_values")
    if pixels is None:
        return [Row(prompt) for prompt in prompts]
    grids = arguments.get("image_grid_thw")
    runs = [_runs(prompt, image_token) for prompt in prompts]
    total = sum(sum(lengths) for lengths in runs)
    parts = _by_grid(pixels, grids, total) if grids is not None else _by_tiles(pixels, [n for r in runs for n in r])
    rows: list[Row] = []
    for prompt, lengths in zip(prompts, runs, strict=True):
        wanted, mine = sum(lengths), list[tuple[Picture, dict[str, torch.Tensor]]]()
        while wanted > 0:
            if not parts or parts[0][0].rows > wanted:
                raise ValueError("pixel_values do not fit the image tokens")
            wanted -= parts[0][0].rows
            mine.append(parts.pop(0))
        media = tuple(Media(_bytes_of(given), name="pixels") for _, given in mine)
        rows.append(Row(prompt, media, tuple(picture for picture, _ in mine), tuple(given for _, given in mine)))
    if parts:
        raise ValueError("pixel_values hold more pictures than the prompts")
    return rows


def joined(rows: Sequence[torch.Tensor], ids: torch.Tensor, lengths: Sequence[int], padding: int) -> torch.Tensor:
    """Results of single prompts as one batch: the padded prompts as they came, then the new tokens, padded at the end.

    rows  one tensor `[sequences, prompt + new]` for every prompt, `lengths` the prompts' tokens without padding
    """
    longest = max(row.shape[1] - length for row, length in zip(rows, lengths, strict=True))
    out: list[torch.Tensor] = []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        new = torch.nn.functional.pad(row[:, length:], (0, longest - (row.shape[1] - length)), value=padding)
        out.append(torch.cat([ids[index].to(new.device).expand(row.shape[0], -1), new], dim=1))
    return torch.cat(out)


def _runs(prompt: Sequence[int], image_token: int | None) -> list[int]:
    """Lengths of the unbroken runs of image tokens."""
    lengths: list[int] = []
    before = False
    for token in prompt:
        here = token == image_token
        if here and before:
            lengths[-1] += 1
        elif here:
            lengths.append(1)
        before = here
    return lengths


def _by_grid(pixels: torch.Tensor, grids: torch.Tensor, total: int) -> list[tuple[Picture, dict[str, torch.Tensor]]]:
    """Pictures of many sizes in one list of patches, told apart by their grids (Qwen-VL)."""
    sizes = grids.prod(-1).tolist()
    merged = sum(sizes) // total if total else 0
    if not merged or sum(sizes) != pixels.shape[0] or merged * total != sum(sizes):
        raise ValueError("pixel_values do not fit image_grid_thw and the image tokens")
    cut = torch.split(pixels, sizes)
    shapes = [(int(grid[0]), int(grid[1]), int(grid[2])) for grid in grids]
    return [
        (Picture(size // merged, grid=shape), {"pixel_values": part, "image_grid_thw": grids[index : index + 1]})
        for index, (size, shape, part) in enumerate(zip(sizes, shapes, cut, strict=True))
    ]


def _by_tiles(pixels: torch.Tensor, runs: Sequence[int]) -> list[tuple[Picture, dict[str, torch.Tensor]]]:
    """Pictures of one or more tiles of equal size (LLaVA, InternVL); those without text between count as one."""
    tiles, total = pixels.shape[0], sum(runs)
    rows = total // tiles if tiles else 0
    if not rows or rows * tiles != total or any(run % rows for run in runs):
        raise ValueError("pixel_values do not fit the image tokens")
    cut = torch.split(pixels, [run // rows for run in runs])
    return [(Picture(run), {"pixel_values": part}) for run, part in zip(runs, cut, strict=True)]


def _bytes_of(given: Mapping[str, torch.Tensor]) -> bytes:
    """What a picture is known by: its pixels as the processor made them, with shape and type."""
    parts: list[bytes] = []
    for name in sorted(given):
        tensor = given[name].detach().cpu().contiguous()
        parts.append(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        parts.append(np.asarray(tensor.view(torch.uint8)).tobytes())
    return b"".join(parts)

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingTypeStubs=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false
"""The Triton kernels of `fused`, which alone imports this module, since Triton may be missing."""

from typing import Any

import torch
import triton
import triton.language as tl

from dejakv.engines.vllm.blend.correction_table import TILE, CorrectionTable
from dejakv.engines.vllm.blend.row_memory import RotaryLayout, RowMemory

COLUMNS = 32
"""Anchors that a program of `offsets_kernel` takes at once."""


def copy_rows(
    source: RowMemory, target: RowMemory, index: torch.Tensor, rotary: RotaryLayout | None
) -> None:
    """Copy rows of all layers in one launch, with keys moved (see `fused.FusedCopy.copy`)."""
    (read, write), (heads, width) = (source.steps, target.steps), source.shape
    assert read is not None
    assert write is not None
    half = 0 if rotary is None else rotary.half
    # Steps are multiples of a head's width.
    kernel = rows_kernel if width % 16 == 0 else rows_kernel_any
    kernel[(index.shape[1], source.layers)](
        source.memory,
        target.memory,
        target.memory if target.bases is None else target.bases,
        source.memory if rotary is None else rotary.table,
        index if rotary is None else rotary.bases,
        index,
        index.shape[1],
        0 if rotary is None else rotary.table.stride(0),
        *(read.page, read.group, read.token, read.layer, read.head),
        *(read.pack, read.number, read.value),
        *(write.page, write.group, write.token, write.layer, write.head),
        *(write.pack, write.number, write.value),
        *(read.block, read.group_size, read.pack_size),
        *(write.block, write.group_size, write.pack_size),
        *(heads, triton.next_power_of_2(heads), width, triton.next_power_of_2(width)),
        *(half, triton.next_power_of_2(max(1, half))),
        NEOX=rotary is not None and rotary.neox_style,
        BY_LAYER=target.bases is not None,
    )


def rows_body(
    source, target, target_bases, table, table_bases, index, rows, table_step,
    r_page, r_group, r_token, r_layer, r_head, r_pack, r_number, r_value,
    w_page, w_group, w_token, w_layer, w_head, w_pack, w_number, w_value,
    R_BLOCK: tl.constexpr, R_GROUP: tl.constexpr, R_PACK: tl.constexpr,
    W_BLOCK: tl.constexpr, W_GROUP: tl.constexpr, W_PACK: tl.constexpr,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr,
    HALF: tl.constexpr, HALF_2: tl.constexpr, NEOX: tl.constexpr, BY_LAYER: tl.constexpr,
):  # fmt: skip
    """Program (row, layer): the heads of one token. Sizes `..._2` are powers of two."""
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    here, there = tl.load(index + row), tl.load(index + rows + row)
    before, after = tl.load(index + 2 * rows + row), tl.load(index + 3 * rows + row)

    token = here % R_BLOCK
    read = source + (
        here // R_BLOCK * r_page
        + token // R_GROUP * r_group
        + token % R_GROUP * r_token
        + layer * r_layer
    )
    token = there % W_BLOCK
    if BY_LAYER:
        base = tl.load(target_bases + layer).to(tl.pointer_type(target.dtype.element_ty))
    else:
        base = target + layer * w_layer
    write = base + (
        there // W_BLOCK * w_page + token // W_GROUP * w_group + token % W_GROUP * w_token
    )
    # Steps between heads grow with the rows: 32 bits do not hold their products.
    head = tl.arange(0, HEADS_2)[:, None].to(tl.int64)

    # V, and the numbers of K that carry no position, are copied as they are.
    number = tl.arange(0, WIDTH_2)[None, :]
    inside = (head < HEADS) & (number < WIDTH)
    r = head * r_head + number // R_PACK * r_pack + number % R_PACK * r_number
    w = head * w_head + number // W_PACK * w_pack + number % W_PACK * w_number
    tl.store(write + w_value + w, tl.load(read + r_value + r, mask=inside), mask=inside)
    if 2 * HALF < WIDTH:
        rest = inside & (number >= 2 * HALF)
        tl.store(write + w, tl.load(read + r, mask=rest), mask=rest)

    if HALF > 0:
        angle = tl.arange(0, HALF_2)[None, :]
        inside = (head < HEADS) & (angle < HALF)
        of_table = tl.load(table_bases + layer).to(tl.pointer_type(table.dtype.element_ty))
        old, new = of_table + before * table_step, of_table + after * table_step
        known = angle < HALF
        old_cos = tl.load(old + angle, mask=known, other=1.0).to(tl.float32)
        old_sin = tl.load(old + HALF + angle, mask=known, other=0.0).to(tl.float32)
        new_cos = tl.load(new + angle, mask=known, other=1.0).to(tl.float32)
        new_sin = tl.load(new + HALF + angle, mask=known, other=0.0).to(tl.float32)
        # As `blend.rope.turn`.
        scale = old_cos * old_cos + old_sin * old_sin
        cos = (new_cos * old_cos + new_sin * old_sin) / scale
        sin = (new_sin * old_cos - new_cos * old_sin) / scale

        # A number's partner lies half of the turned numbers apart, else beside it.
        first = angle if NEOX else 2 * angle
        second = angle + HALF if NEOX else 2 * angle + 1
        r1 = head * r_head + first // R_PACK * r_pack + first % R_PACK * r_number
        r2 = head * r_head + second // R_PACK * r_pack + second % R_PACK * r_number
        raw1, raw2 = tl.load(read + r1, mask=inside), tl.load(read + r2, mask=inside)
        x, y = raw1.to(tl.float32), raw2.to(tl.float32)
        # What does not move stays bit for bit.
        stays = before == after
        turned1 = tl.where(stays, raw1, (x * cos - y * sin).to(raw1.dtype))
        turned2 = tl.where(stays, raw2, (y * cos + x * sin).to(raw2.dtype))
        w1 = head * w_head + first // W_PACK * w_pack + first % W_PACK * w_number
        w2 = head * w_head + second // W_PACK * w_pack + second % W_PACK * w_number
        tl.store(write + w1, turned1, mask=inside)
        tl.store(write + w2, turned2, mask=inside)


def correct_rows(
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    source: RowMemory,
    target: RowMemory,
    table: CorrectionTable,
) -> None:
    """Correct rows of one layer in one launch (see `fused.FusedCopy.correct`)."""
    (read, write), (heads, width) = (source.steps, target.steps), source.shape
    assert read is not None
    assert write is not None
    kernel = offsets_kernel if width % 16 == 0 else offsets_kernel_any
    kernel[(len(table.tiles), heads, 2)](
        *(key, value, rows, key.stride(0), value.stride(0), key.stride(1), value.stride(1)),
        *(source.memory, read.page, read.layer, read.head, read.value),
        *(target.memory, target.memory if target.bases is None else target.bases, layer),
        *(write.page, write.group, write.token, write.layer, write.head),
        *(write.pack, write.number, write.value),
        *table,
        *(write.block, write.group_size, write.pack_size),
        *(width, triton.next_power_of_2(width), TILE, COLUMNS),
        BY_LAYER=target.bases is not None,
    )


def offsets_body(
    key, value, rows, key_step, value_step, key_head, value_head,
    source, r_row, r_layer, r_head, r_value,
    target, target_bases, layer,
    w_page, w_group, w_token, w_layer, w_head, w_pack, w_number, w_value,
    weights, tiles, rest, slots, anchors, places,
    W_BLOCK: tl.constexpr, W_GROUP: tl.constexpr, W_PACK: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BY_LAYER: tl.constexpr,
):  # fmt: skip
    """Program (tile, head, half): the corrected rows of a tile, of K (half 0) or V."""
    tile, half = tiles + 5 * tl.program_id(0), tl.program_id(2)
    head, layer = tl.program_id(1).to(tl.int64), layer.to(tl.int64)
    first, count = tl.load(tile), tl.load(tile + 1)
    first_anchor, anchor_count, first_weight = (
        tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4),
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    inside = row < count
    number = tl.arange(0, WIDTH_2)
    known = (number < WIDTH)[None, :]
    if half == 0:
        fresh, fresh_step = key + head * key_head, key_step
    else:
        fresh, fresh_step = value + head * value_head, value_step
    donors = source + layer * r_layer + head * r_head + half * r_value

    # Not `tl.zeros`, which is a program of its own.
    moved = tl.full((ROWS, WIDTH_2), 0.0, tl.float32)
    for begin in range(0, anchor_count, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        there = column < anchor_count
        weight = tl.load(
            weights + first_weight + row[:, None] * anchor_count + column[None, :],
            mask=inside[:, None] & there[None, :],
            other=0.0,
        )
        place = tl.load(places + first_anchor + column, mask=there, other=0)
        token = tl.load(rows + place, mask=there, other=0)
        anchor = tl.load(anchors + first_anchor + column, mask=there, other=0)
        mask = there[:, None] & known
        new = tl.load(fresh + token[:, None] * fresh_step + number[None, :], mask=mask, other=0.0)
        old = tl.load(donors + anchor[:, None] * r_row + number[None, :], mask=mask, other=0.0)
        shift = new.to(tl.float32) - old.to(tl.float32)
        moved += tl.dot(weight, shift, input_precision="ieee")

    mask = inside[:, None] & known
    place = tl.load(rest + first + row, mask=inside, other=0)
    before = tl.load(donors + place[:, None] * r_row + number[None, :], mask=mask, other=0.0)
    slot = tl.load(slots + first + row, mask=inside, other=0)
    token = slot % W_BLOCK
    if BY_LAYER:
        base = tl.load(target_bases + layer).to(tl.pointer_type(target.dtype.element_ty))
    else:
        base = target + layer * w_layer
    write = base + half * w_value + head * w_head + (
        slot // W_BLOCK * w_page + token // W_GROUP * w_group + token % W_GROUP * w_token
    )[:, None]  # fmt: skip
    write += (number // W_PACK * w_pack + number % W_PACK * w_number)[None, :]
    tl.store(write, (before.to(tl.float32) + moved).to(before.dtype), mask=mask)


# Any, since its types, where they can be read, refuse a list of names.
_jit: Any = triton.jit

# A number that 16 divides, or 1, is compiled apart, which would happen while requests wait. Where
# a head's width is a multiple of 16 all steps are, and are known to be so. Elsewhere they vary.
_COUNTS = ["rows", "table_step"]
_STEPS = [f"{side}_{step}" for side in "rw" for step in ("page", "group", "token", "layer", "head")]
_STEPS += ["r_value", "w_value", "r_pack", "w_pack"]
rows_kernel = _jit(rows_body, do_not_specialize=_COUNTS)
rows_kernel_any = _jit(rows_body, do_not_specialize=_COUNTS + _STEPS)
_STEPS = ["key_step", "value_step", "key_head", "value_head", "r_row", "r_layer", "r_head"]
_STEPS += ["r_value", "w_page", "w_group", "w_token", "w_layer", "w_head", "w_pack", "w_value"]
offsets_kernel = _jit(offsets_body, do_not_specialize=["layer"])
offsets_kernel_any = _jit(offsets_body, do_not_specialize=["layer", *_STEPS])

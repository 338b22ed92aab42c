"""Keys that were rotated for one position, turned to another by the model's own rotary function.

A cached key is R(source) k, R being the model's rotation of a position. Composed tables for
R(target) R(source)^-1 move it in one turn: cos(t - s) = cos t cos s + sin t sin s, sin(t - s) = sin
t cos s - cos t sin s, entry by entry, whatever the layout (halves, interleaved) and even where both
ends have other frequencies (dynamic NTK). Models that scale their tables (yarn) put the scale into
the keys: dividing by cos^2 + sin^2 of the source takes the source's scale out again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ApplyRotary = Callable[..., tuple[Tensor, Tensor]]
Tables = tuple[Tensor, Tensor]

_MAX_ROTATED = 1 << 17
"""Numbers rotated at once, so that what they pass through stays in the processor's cache."""


def turn(target: Tables, source: Tables) -> Tables:
    """Compose tables that move keys from `source` to `target` positions, row by row.

    All are `[..., tokens, d]` float32.
    """
    (ct, st), (cs, ss) = target, source
    scale = cs * cs + ss * ss
    return (ct * cs + st * ss) / scale, (st * cs - ct * ss) / scale


def rotate(
    apply: ApplyRotary, keys: Tensor, tables: Tables, *, partial: bool, out: Tensor | None = None
) -> Tensor:
    """Rotate keys in float32 and return them in their own type.

    Parameters
    ----------
    apply : ApplyRotary
        The model's `apply_rotary_pos_emb`.
    keys : Tensor, shape [batch, heads, tokens, head_dim]
        Keys to rotate.
    tables : tuple[Tensor, Tensor], shape [1, tokens, d]
        Cosines and sines.
    partial : bool
        Whether only the first `d` numbers of a head carry positions and the function does not know
        it (Phi, StableLM).
    out : Tensor, optional
        Where the result is written, of the keys' shape. It may be the keys themselves.
    """
    out = torch.empty_like(keys) if out is None else out
    step = max(1, _MAX_ROTATED // max(1, keys[:1].numel()))
    for key_slice, rotated in zip(keys.split(step), out.split(step), strict=True):
        rotated.copy_(_rotated(apply, key_slice.float(), tables, partial))
    return out


def rotate_pairs(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate keys whose neighbouring numbers are one complex number; queries stay as they are.

    Parameters
    ----------
    keys : Tensor, shape [batch, heads, tokens, d]
        Keys to rotate, float32.
    cos, sin : Tensor, shape [1, tokens, d / 2]
        Real and imaginary part of a model's complex table.
    """
    pairs = torch.view_as_complex(keys.unflatten(-1, (-1, 2)).contiguous())
    return queries, torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)


def rotate_halves(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate keys whose two halves are paired, as Llama's; queries stay as they are.

    Parameters
    ----------
    keys : Tensor, shape [batch, heads, tokens, d]
        Keys to rotate, float32.
    cos, sin : Tensor, shape [1, tokens, d]
        A model's tables.
    """
    first, second = keys.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return queries, keys * cos[:, None] + turned * sin[:, None]


def _rotated(apply: ApplyRotary, keys: Tensor, tables: Tables, partial: bool) -> Tensor:
    cos, sin = tables
    if not partial:
        # The function rotates queries too, so it gets none.
        return apply(keys[:0], keys, cos, sin)[1]
    # The rest of each head carries no position and stays as it is.
    width = cos.shape[-1]
    turned = keys[..., :width]
    return torch.cat([apply(turned[:0], turned, cos, sin)[1], keys[..., width:]], dim=-1)

"""Attention on a CPU that leaves out what a mask hides.

Rows behind an exact prefix, and the rows of a blend, attend with an explicit mask, and torch's
attention on a CPU computes every element of it. Most rows see a part of the prompt alone. So the
rows are taken in groups, each with the keys that one of its rows sees: on SmolLM2's heads 500 rows
among 1,500 keys took .53 to .6 of the time, and results differ by rounding. A whole prompt, which
has a causal mask that torch knows of, is left as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROWS = 64
"""Rows that attend together. With 32 and with 128 it takes as long, with 256 longer."""

MIN_KEYS = 512
"""Fewest keys to divide for: with 700 it gains next to nothing."""

Piece = tuple[slice, slice]
"""Rows, and the keys that they see."""


class VisibleKeys(TorchFunctionMode):
    """Mode in which masked attention on a CPU reads the visible keys alone.

    No class or function is replaced, and other threads see nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        # Layers of one kind share a mask.
        self._pieces_by_mask: dict[int, tuple[Tensor, list[Piece]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention or len(args) != 3:
            return func(*args, **kwargs)

        query, key, value = args
        mask = kwargs.get("attn_mask")
        if not _applies(query, key, mask):
            return func(*args, **kwargs)

        cached_pieces = self._pieces_by_mask.get(id(mask))
        if cached_pieces is None:
            # With the mask itself: its id then belongs to no other object.
            cached_pieces = self._pieces_by_mask[id(mask)] = (mask, pieces_of(mask))

        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        for rows, keys in cached_pieces[1]:
            seen = {**kwargs, "attn_mask": mask[:, :, rows, keys]}
            out[:, :, rows] = func(query[:, :, rows], key[:, :, keys], value[:, :, keys], **seen)
        return out


def _applies(query: Tensor, key: Tensor, mask: Any) -> bool:
    if (
        not isinstance(mask, Tensor)
        or mask.dtype != torch.bool
        or mask.dim() != 4
        or query.device.type != "cpu"
    ):
        return False
    rows, keys = query.shape[2], key.shape[2]
    return rows > ROWS and keys >= MIN_KEYS and mask.shape[2:] == (rows, keys)


def pieces_of(mask: Tensor) -> list[Piece]:
    """Divide a mask's rows into groups of at most `ROWS`, each with the keys that it needs.

    The keys are those from the first to the last that one of the rows sees. Rows that see nothing
    are left with all keys.

    Parameters
    ----------
    mask : Tensor, shape [batch, heads, rows, keys]
        True where a row sees a key.
    """
    # Or each operation here would pass through the mode again.
    with torch._C.DisableTorchFunction():
        pieces: list[Piece] = []
        for first in range(0, mask.shape[2], ROWS):
            rows = slice(first, min(first + ROWS, mask.shape[2]))
            seen = mask[:, :, rows].flatten(0, 1)
            keys = seen.any(0).any(0).nonzero().flatten()
            if len(keys) and bool(seen.any(-1).all()):
                pieces.append((rows, slice(int(keys[0]), int(keys[-1]) + 1)))
            else:
                pieces.append((rows, slice(0, mask.shape[3])))
        return pieces


@contextmanager
def skip_hidden_keys(model: nn.Module, attention: str) -> Iterator[None]:
    """Let forwards of a model over many rows leave out hidden keys, within the context.

    It acts if the model's attention is torch's on a CPU. Forwards of a few rows, as in decoding,
    run as ever. Hooks are on the model meanwhile.
    """
    if attention != "sdpa" or next(model.parameters()).device.type != "cpu":
        yield
        return

    entered: list[VisibleKeys] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
        model_input = next((candidate for candidate in inputs if candidate is not None), None)
        if (
            isinstance(model_input, Tensor)
            and model_input.dim() > 1
            and model_input.shape[1] > ROWS
        ):
            mode = VisibleKeys()
            mode.__enter__()
            entered.append(mode)

    def after(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        # A forward that did not come to its hook has left the mode on.
        after()

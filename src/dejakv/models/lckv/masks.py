"""Which keys a row may see: padding, causality, the masked diagonal, sliding windows."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Masks:
    """`causal` [batch, 1, rows, keys] true where a row sees a key; `places` [batch, 1, rows, 1] the row's own key."""

    causal: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls, attention_mask: torch.Tensor | None, batch: int, past: int, tokens: int, device: torch.device
    ) -> "Masks":
        """All rows of `tokens` new tokens behind `past` held ones.

        attention_mask  None, [batch, past + tokens] (0 is padding), or [batch, 1, tokens, past + tokens] of booleans,
                        which replaces causality. Raises: ValueError for another shape
        """
        places = torch.arange(past, past + tokens, device=device)[None, None, :, None].expand(batch, 1, tokens, 1)
        keys = torch.arange(past + tokens, device=device)
        if attention_mask is not None and attention_mask.ndim == 4:
            if attention_mask.dtype != torch.bool or attention_mask.shape[-2:] != (tokens, past + tokens):
                raise ValueError(
                    f"a mask of shape {tuple(attention_mask.shape)} and {attention_mask.dtype} does not fit {tokens} "
                    f"tokens behind {past}: give booleans [batch, 1, {tokens}, {past + tokens}]"
                )
            return cls(attention_mask.expand(batch, -1, -1, -1), places)
        causal = keys <= places
        if attention_mask is not None:
            if attention_mask.shape != (batch, past + tokens):
                raise ValueError(
                    f"attention_mask of shape {tuple(attention_mask.shape)} does not fit a batch of {batch} with "
                    f"{past} tokens held and {tokens} new: give [{batch}, {past + tokens}]"
                )
            causal = causal & attention_mask.to(device).bool()[:, None, None, :]
        return cls(causal, places)

    def pick(self, rows: torch.Tensor) -> "Masks":
        """The rows [batch, r] alone, counted among the new tokens."""
        index = rows[:, None, :, None]
        return Masks(
            self.causal.gather(2, index.expand(-1, 1, -1, self.causal.shape[-1])), self.places.gather(2, index)
        )

    def view(self, *, strict: bool, window: int | None) -> torch.Tensor:
        """Booleans [batch, 1, rows, keys] for one kind of layer. `strict` masks the diagonal."""
        if not strict and window is None:
            return self.causal
        keys = torch.arange(self.causal.shape[-1], device=self.causal.device)
        seen = self.causal
        if strict:
            seen = seen & (keys != self.places)
        if window is not None:
            seen = seen & (keys > self.places - window)
        return seen

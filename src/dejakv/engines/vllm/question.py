"""How much a prompt's question attends to its tokens, from which `query` and `prophet` choose rows."""

import math
from typing import Any

import torch

from dejakv.engines.vllm.compat_forward import NULL_BLOCK
from dejakv.engines.vllm.drafts import Draft
from dejakv.engines.vllm.paged import PagedKV
from dejakv.engines.vllm.row_batch import Rows
from dejakv.engines.vllm.row_forward import RowForward


def question_attention(
    forward: RowForward, paged: PagedKV, draft: Draft, block_ids: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    """Over the layers that the selector asks: `[n]` float32; and the rows computed for it.

    One pass of the question's rows alone, to the prompt's last one, over the donors' state in the blocks. It writes only rows that
    the real pass computes again or that vLLM computes. The blocks end where vLLM begins to compute; the rows behind them are
    written to the null block, as far as it holds them.
    """
    blocks = (*block_ids, NULL_BLOCK)
    room = min(len(draft.ids), len(blocks) * paged.block_tokens)
    rows = draft.plan.of_question(draft.tail).fixed()
    rows = rows[rows < room]
    first = draft.plan.selector.first_asked(len(paged.caches))
    asking = rows >= len(draft.ids) - draft.tail
    seen = torch.zeros(len(draft.ids), device=paged.device)

    def asked(layer: int, _prompt: int, queries: torch.Tensor) -> None:
        if layer >= first:
            keys = paged.keys(blocks, layer, room)
            seen[:room] += _weights(rows[asking], queries[asking], keys, paged.attention(layer).impl)

    forward.run([Rows(draft.ids[rows], rows, blocks)], asked=asked)
    return seen, len(rows)


def _weights(rows: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, impl: Any) -> torch.Tensor:
    """How much the rows attend to each token up to themselves, summed over heads and rows: `[tokens]` float32."""
    by_group = queries.view(len(rows), keys.shape[0], -1, keys.shape[-1]).float()
    scores = torch.einsum("rhgd,hkd->hgrk", by_group, keys.float()) * impl.scale
    cap = getattr(impl, "logits_soft_cap", None) or 0.0
    if cap > 0.0:
        scores = cap * torch.tanh(scores / cap)
    later = torch.arange(keys.shape[1], device=rows.device)[None] > rows[:, None]
    return scores.masked_fill(later, -math.inf).softmax(-1).sum((0, 1, 2))

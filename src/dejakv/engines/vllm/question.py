"""How much a prompt's question attends to its tokens, which ranks the tokens to recompute."""

import math
from typing import Any

import torch

from dejakv.blend.settings import first_asked
from dejakv.engines.vllm.compat_forward import NULL_BLOCK
from dejakv.engines.vllm.drafts import Draft
from dejakv.engines.vllm.paged import PagedKV
from dejakv.engines.vllm.row_batch import PromptRows
from dejakv.engines.vllm.row_forward import RowForward


def question_attention(
    forward: RowForward, paged: PagedKV, draft: Draft, block_ids: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    """Over the last third of the layers: `[n]` float32; and the rows computed for it.

    One pass of the question's rows alone, to the prompt's last one, over the donors' state in the blocks. It writes only rows that
    the real pass computes again or that vLLM computes. The blocks end where vLLM begins to compute; the rows behind them are
    written to the null block, as far as it holds them.
    """
    blocks = (*block_ids, NULL_BLOCK)
    room = min(len(draft.ids), len(blocks) * paged.block_tokens)
    rows = draft.plan.of_question(draft.tail).tokens
    rows = rows[rows < room]
    first = first_asked(len(paged.caches))
    asking = rows >= len(draft.ids) - draft.tail
    seen = torch.zeros(len(draft.ids), device=paged.device)

    def asked(layer: int, _prompt: int, queries: torch.Tensor) -> None:
        if layer >= first:
            keys = paged.keys(blocks, layer, room)
            seen[:room] += _weights(queries[asking], keys, paged.attention(layer).impl)

    forward.run([PromptRows(draft.ids[rows], rows, blocks)], asked=asked)
    return seen, len(rows)


def _weights(queries: torch.Tensor, keys: torch.Tensor, impl: Any) -> torch.Tensor:
    """How much the last rows attend to each token up to themselves, summed over heads and rows: `[tokens]` float32.

    queries  of these rows `[k, heads, head_dim]`
    keys     of all tokens `[kv_heads, tokens, head_dim]`
    """
    count, heads, width = queries.shape
    by_group = queries.float().transpose(0, 1).reshape(keys.shape[0], -1, width)
    scores = torch.bmm(by_group, keys.float().mT).mul_(impl.scale).view(heads, count, -1)
    cap = getattr(impl, "logits_soft_cap", None) or 0.0
    if cap > 0.0:
        scores = cap * torch.tanh(scores / cap)
    later = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    scores[:, :, scores.shape[2] - count :].masked_fill_(later, -math.inf)
    return scores.softmax(-1).sum((0, 1))

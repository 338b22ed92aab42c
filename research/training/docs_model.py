"""docs-lm and the forward pass it is trained with.

It is an ordinary Llama, run over a document and many questions at once.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dejakv_models.docs import BOS, EOS
from dejakv_models.docs_facts import ATTRIBUTES, NAMES
from research.training.docs_data import Batch
from research.training.docs_tokenizer import PAD, vocabulary

SIZES = {
    "full": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "half": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
}
SUPERVISED_LAYER = 2


def build(size: str, context: int = 2048) -> LlamaForCausalLM:
    """A fresh model; weights follow from torch's seed."""
    words = vocabulary()
    shape = SIZES[size]
    config = LlamaConfig(
        **shape,
        num_key_value_heads=2,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        vocab_size=len(words),
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        pad_token_id=words.index(PAD),
        bos_token_id=words.index(BOS),
        eos_token_id=words.index(EOS),
    )
    model = LlamaForCausalLM(config)
    # Embeddings of the usual .02 drown in what the layers add, and copying a value is then learnt
    # late.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    return model


class Helpers(nn.Module):
    """Linear heads that read a hidden state, the same ones in both places: who and what is spoken
    of at a stated value and at an answer marker, and the value where it is stated and, one
    layer on, where it is asked for.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.name = nn.Linear(hidden, len(NAMES))
        self.attribute = nn.Linear(hidden, len(ATTRIBUTES))
        self.value = nn.Linear(hidden, len(vocabulary()))


@dataclass
class Losses:
    """answer: cross entropy of the answer and the end marker. binding: of the linear heads.
    attention: of the supervised heads' scores against the stated value. right, bound, looked:
    shares of questions (facts) that are right.
    """

    answer: torch.Tensor
    binding: torch.Tensor
    attention: torch.Tensor
    right: torch.Tensor
    bound: torch.Tensor
    looked: torch.Tensor


def question_mask(b: Batch) -> torch.Tensor:
    """[B, 1, Q*L, T+Q*L] what a question's token sees: the document, its own question so far,
    earlier turns if any.
    """
    n, t = b.doc.shape
    _, q, length = b.ask.shape
    device = b.doc.device
    seen_doc = torch.arange(t, device=device) < b.doc_len[:, None]
    seen_doc = seen_doc[:, None, :].expand(n, q * length, t)
    step = torch.arange(length, device=device)
    number = torch.arange(q, device=device)
    causal = step[:, None] >= step[None, :]
    own = (number[:, None] == number[None, :])[:, None, :, None] & causal[None, :, None, :]
    own = own.expand(n, q, length, q, length)
    if b.turns:
        real = step < b.ask_len[:, :, None]
        earlier = (number[:, None] > number[None, :])[None, :, None, :, None] & real[
            :, None, None, :, :
        ]
        own = own | earlier
    return torch.cat([seen_doc, own.reshape(n, q * length, q * length)], -1)[:, None]


def run(model: LlamaForCausalLM, helpers: Helpers, b: Batch) -> Losses:
    """One pass over a batch.

    The last layer is computed only where an answer or an end marker is predicted.
    """
    llama, config = model.model, model.config
    n, t = b.doc.shape
    _, q, length = b.ask.shape
    device = b.doc.device
    x = llama.embed_tokens(torch.cat([b.doc, b.ask.view(n, -1)], 1))
    cos, sin = llama.rotary_emb(x, torch.cat([b.doc_pos, b.ask_pos.view(n, -1)], 1))
    mask = question_mask(b)
    rows = torch.arange(n, device=device)[:, None]
    marker = t + torch.arange(q, device=device) * length + b.at
    ends = torch.cat([marker, marker + 1], 1)
    answers = b.ask.gather(2, b.at[..., None] + 1).squeeze(2)
    binding = attention = bound = looked = x.new_zeros(())
    for number, layer in enumerate(llama.layers):
        last = number == config.num_hidden_layers - 1
        normed = layer.input_layernorm(x)
        attn = layer.self_attn
        queries_from = normed[rows, ends] if last else normed
        query, key, value = (
            p(h).view(n, h.shape[1], -1, config.head_dim).transpose(1, 2)
            for p, h in ((attn.q_proj, queries_from), (attn.k_proj, normed), (attn.v_proj, normed))
        )
        key, _ = apply_rotary_pos_emb(key, key, cos, sin)
        c, s = (cos[rows, ends], sin[rows, ends]) if last else (cos, sin)
        query, _ = apply_rotary_pos_emb(query, query, c, s)
        groups = query.shape[1] // key.shape[1]
        if number == SUPERVISED_LAYER:
            asked = query[:, :groups].gather(
                2, marker[:, None, :, None].expand(n, groups, q, config.head_dim)
            )
            scores = (asked @ key[:, :1].transpose(2, 3)).float() * attn.scaling
            attention, looked = attended(scores, mask[rows, 0, marker - t], b)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if last:
            seen = mask[rows, 0, ends - t][:, None]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        else:
            sdpa = F.scaled_dot_product_attention
            over_doc = sdpa(query[:, :, :t], key[:, :, :t], value[:, :, :t], is_causal=True)
            mixed = torch.cat([over_doc, sdpa(query[:, :, t:], key, value, attn_mask=mask)], 2)
        x = x[rows, ends] if last else x
        x = x + attn.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if number == SUPERVISED_LAYER - 1:
            sites = torch.cat([x[b.facts[:, 0], b.facts[:, 1]], x[rows, marker].flatten(0, 1)])
            who = torch.cat([b.facts[:, 2], b.asked[..., 0].flatten()])
            what = torch.cat([b.facts[:, 3], b.asked[..., 1].flatten()])
            names, attributes = helpers.name(sites), helpers.attribute(sites)
            stated = b.doc[b.facts[:, 0], b.facts[:, 1]]
            values = helpers.value(sites[: len(stated)]).float()
            binding = F.cross_entropy(names.float(), who) + F.cross_entropy(
                attributes.float(), what
            )
            binding = binding + F.cross_entropy(values, stated)
            bound = ((names.argmax(-1) == who) & (attributes.argmax(-1) == what)).float().mean()
        if number == SUPERVISED_LAYER:
            values = helpers.value(x[rows, marker]).float()
            binding = binding + F.cross_entropy(values.flatten(0, 1), answers.flatten())
    answer, right = answered(model.lm_head(llama.norm(x)).float(), answers, config.eos_token_id)
    return Losses(answer, binding, attention, right, bound, looked)


def attended(
    scores: torch.Tensor, seen: torch.Tensor, b: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of attention scores `[B, heads, Q, tokens]` against the place of the stated value,
    and the share that looks there.
    """
    scores = scores.masked_fill(~seen[:, None], -1e9)
    target = b.value_at[:, None].expand(scores.shape[:3])
    return (
        F.cross_entropy(scores.flatten(0, 2), target.flatten()),
        (scores.argmax(-1) == target).float().mean(),
    )


def answered(
    logits: torch.Tensor, answers: torch.Tensor, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the answers and of the end markers behind them, logits `[B, 2Q, vocabulary]`,
    and the share of right answers.
    """
    q = answers.shape[1]
    loss = F.cross_entropy(logits[:, :q].flatten(0, 1), answers.flatten())
    ends = F.cross_entropy(logits[:, q:].flatten(0, 1), torch.full_like(answers, end).flatten())
    return loss + 0.1 * ends, (logits[:, :q].argmax(-1) == answers).float().mean()

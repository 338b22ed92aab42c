"""Train the documents' task in models whose layers keep other state than keys and values.

    python -m research.training.state_kinds --kind hybrid --out runs/hybrid

`hybrid` has linear attention in three layers of four (Qwen3-Next's), `latent` the latent attention
of DeepSeek V3, `ordinary` is a Llama of docs-lm's shape; all see the same batches. Every batch is a
talk: a recurrent layer cannot leave out the questions before its own.
"""

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3NextConfig

from research.training.docs import DocsTrainer, docs_parser, next_batch
from research.training.docs_data import Batch
from research.training.docs_model import SIZES, SUPERVISED_LAYER, Losses, answered, build
from research.training.loop import start

KINDS = ("hybrid", "latent", "ordinary")
LATENT, ROTARY = 48, 16
"""Latent numbers and rotary numbers of a token in a latent layer."""

_SUPERVISED_HEADS = 2


def build_kind(kind: str, size: str = "full", context: int = 2048) -> Any:
    """Return a fresh model of a kind; weights follow from torch's seed."""
    llama = build(size, context)
    if kind == "ordinary":
        return llama
    own = {"rope_parameters", "pad_token_id", "bos_token_id", "eos_token_id", "vocab_size"}
    given = {name: getattr(llama.config, name) for name in own | {"tie_word_embeddings"}}
    common: dict[str, Any] = {**SIZES[size], **given, "max_position_embeddings": context}
    layers, head = common["num_hidden_layers"], llama.config.head_dim
    if kind == "latent":
        config: Any = DeepseekV3Config(
            **common, num_key_value_heads=common["num_attention_heads"], q_lora_rank=None,
            kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY, qk_nope_head_dim=head, v_head_dim=head,
            first_k_dense_replace=layers, n_routed_experts=4, n_group=1, topk_group=1,
            num_experts_per_tok=2, moe_intermediate_size=16,
        )  # fmt: skip
    else:
        kinds = ["linear_attention"] * layers
        # The layer whose heads learn where to look.
        kinds[SUPERVISED_LAYER] = "full_attention"
        config = Qwen3NextConfig(
            **common, num_key_value_heads=2, head_dim=head, layer_types=kinds,
            mlp_only_layers=list(range(layers)), linear_num_key_heads=4, linear_num_value_heads=4,
            linear_key_head_dim=head, linear_value_head_dim=head,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    return model


def packed(b: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a batch of talks without padding inside.

    Returns
    -------
    ids, positions : torch.Tensor
        Tokens and their positions, `[documents, tokens]`.
    markers : torch.Tensor
        Places of the signs to answer, `[documents, questions]`.
    """
    ids: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    markers: list[list[int]] = []
    for document in range(len(b.doc)):
        length = int(b.doc_len[document])
        parts = [b.doc[document, :length]]
        places = [b.doc_pos[document, :length]]
        markers.append([])
        for question, size in enumerate(b.ask_len[document].tolist()):
            markers[-1].append(length + int(b.at[document, question]))
            parts.append(b.ask[document, question, :size])
            places.append(b.ask_pos[document, question, :size])
            length += size
        ids.append(torch.cat(parts))
        positions.append(torch.cat(places))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, True), pad(positions, True), torch.tensor(markers, device=b.doc.device)


def run_talks(model: Any, helpers: Any, b: Batch) -> Losses:
    """Do for any model what `docs_model.run` does for a Llama, on talks."""
    ids, positions, marker = packed(b)
    # What pads a row stands behind all that predicts. Without a mask, gaps in the positions would
    # be taken for borders between prompts.
    out = model.model(
        input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False,
        output_hidden_states=True, output_attentions=True,
    )  # fmt: skip
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    answers = b.ask.gather(2, b.at[..., None] + 1).squeeze(2)

    before, after = (out.hidden_states[SUPERVISED_LAYER + step] for step in (0, 1))
    sites = torch.cat([before[b.facts[:, 0], b.facts[:, 1]], before[rows, marker].flatten(0, 1)])
    who = torch.cat([b.facts[:, 2], b.asked[..., 0].flatten()])
    what = torch.cat([b.facts[:, 3], b.asked[..., 1].flatten()])
    names, attributes = helpers.name(sites).float(), helpers.attribute(sites).float()
    stated = b.doc[b.facts[:, 0], b.facts[:, 1]]
    values = helpers.value(sites[: len(stated)]).float()
    binding = F.cross_entropy(names, who) + F.cross_entropy(attributes, what)
    binding = binding + F.cross_entropy(values, stated)
    asked_values = helpers.value(after[rows, marker]).float()
    binding = binding + F.cross_entropy(asked_values.flatten(0, 1), answers.flatten())
    bound = ((names.argmax(-1) == who) & (attributes.argmax(-1) == what)).float().mean()

    # Of a hybrid only the layers with attention are listed.
    seen = out.attentions[SUPERVISED_LAYER if len(out.attentions) > SUPERVISED_LAYER else 0]
    looks = seen[rows, :_SUPERVISED_HEADS, marker].float().movedim(2, 1)
    target = b.value_at[:, None].expand(looks.shape[:3])
    attention = -(looks.gather(3, target[..., None]) + 1e-6).log().mean()
    looked = (looks.argmax(-1) == target).float().mean()

    ends = torch.cat([marker, marker + 1], 1)
    logits = model.lm_head(out.last_hidden_state[rows, ends]).float()
    answer, right = answered(logits, answers, model.config.eos_token_id)
    return Losses(answer, binding, attention, right, bound, looked)


class KindTrainer(DocsTrainer):
    """Documents of up to 64 facts: what a few minutes reach."""

    levels = 6

    def make_model(self) -> Any:
        """Return the model as training begins with it."""
        model = build_kind(self.options.kind, self.options.size, self.options.context)
        model.set_attn_implementation("eager")
        return model

    def due(self, done: float) -> bool:
        """Tell whether the next level begins whatever the accuracy is: all are seen in time."""
        return done > 0.4 + 0.1 * self.progress.level

    def batch(self, rng: random.Random, done: float) -> Batch:
        """Return talks of the level."""
        o = self.options
        return next_batch(rng, self.progress.level, done, o.tokens, o.context, talks=1.0)

    def run(self, batch: Batch, rng: random.Random, done: float) -> Losses:
        """Return the losses of one pass over a batch."""
        return run_talks(self.parts["model"], self.parts["helpers"], batch)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser: argparse.ArgumentParser = docs_parser(
        "state_kinds", __doc__, out="runs/state-kinds", steps=700, tokens=1200, lr=2e-3, size="half"
    )
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    start(KindTrainer, parser, None if arguments is None else list(arguments))


if __name__ == "__main__":
    main()

"""Train docs-lckv or its Llama twin from docs-lm: `python -m research.training.lckv`.

`--twin` trains the twin.
"""

import random
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dejakv.models import load
from dejakv.prototypes.lckv.configuration import LCKVLlamaConfig
from dejakv.prototypes.lckv.modeling import LCKVLlamaForCausalLM
from dejakv.prototypes.lckv.passes import LoopIterations
from research.training.docs import DocsTrainer, docs_parser
from research.training.docs_data import Batch
from research.training.docs_model import SUPERVISED_LAYER, Losses, answered, attended, question_mask
from research.training.loop import start

LAYOUT = "0_1_4_4_4"
"""Two ordinary layers at the bottom (the paper's w = 2), and all above attend to the KV of the top.
"""


def twin_from(start: str) -> LlamaForCausalLM:
    """The model `start` with a layer on top that changes nothing yet: its keys and values are
    those of the layer that looks facts up, its outputs zero.
    """
    old, _ = load(start)
    config = LlamaConfig.from_dict(
        {**old.config.to_dict(), "num_hidden_layers": old.config.num_hidden_layers + 1}
    )
    model = LlamaForCausalLM(config)
    missing, _ = model.load_state_dict(old.state_dict(), strict=False)
    top = f"model.layers.{config.num_hidden_layers - 1}."
    assert all(name.startswith(top) for name in missing)
    model.model.layers[-1].load_state_dict(model.model.layers[SUPERVISED_LAYER].state_dict())
    with torch.no_grad():
        model.model.layers[-1].self_attn.o_proj.weight.zero_()
        model.model.layers[-1].mlp.down_proj.weight.zero_()
    return model


def lckv_from(twin: LlamaForCausalLM, layout: str = LAYOUT) -> LCKVLlamaForCausalLM:
    """The twin's weights in a condensed model: projections that the layout has no use for are
    dropped.
    """
    settings = {
        k: v for k, v in twin.config.to_dict().items() if k not in ("model_type", "architectures")
    }
    model = LCKVLlamaForCausalLM(LCKVLlamaConfig.from_dict({**settings, "kv_layout": layout}))
    own = model.state_dict()
    model.load_state_dict({k: v for k, v in twin.state_dict().items() if k in own})
    return model


def draw_iterations(rng: random.Random, progress: float) -> LoopIterations:
    """Few passes without gradient, now and then many: what the KV settles to must not depend on
    their number.
    """
    least = 1 if progress > 0.5 else 0
    return LoopIterations(rng.choice((least, 1, 2, 3)) if rng.random() < 0.9 else 7, 2)


def run_lckv(model: LCKVLlamaForCausalLM, b: Batch, how: LoopIterations) -> Losses:
    """What `research.training.docs_model.run` does for a Llama, without the linear heads:
    `binding` and `bound` are zero.
    """
    decoder, config = model.model, model.config
    n, t = b.doc.shape
    _, q, length = b.ask.shape
    device = b.doc.device
    embeds = decoder.embed_tokens(torch.cat([b.doc, b.ask.view(n, -1)], 1))
    seen = torch.zeros(n, 1, t + q * length, t + q * length, dtype=torch.bool, device=device)
    seen[:, :, :t, :t] = torch.ones(t, t, dtype=torch.bool, device=device).tril()
    seen[:, :, t:] = question_mask(b)
    rows = decoder.rows(embeds, seen, torch.cat([b.doc_pos, b.ask_pos.view(n, -1)], 1), 0)
    passes = decoder.passes(None, embeds.shape[1])
    rows = passes.run_layers(rows, decoder.layout.bottom)
    done = passes.settle(rows, how)
    done = passes.run_layers(done, decoder.layout.top)

    number = torch.arange(n, device=device)[:, None]
    marker = t + torch.arange(q, device=device) * length + b.at
    answers = b.ask.gather(2, b.at[..., None] + 1).squeeze(2)
    before = passes.trace[SUPERVISED_LAYER]
    layer: Any = decoder.layers[SUPERVISED_LAYER]
    place = (rows.rotary[0][number, marker], rows.rotary[1][number, marker])
    queries = layer.self_attn.queries(layer.input_layernorm(before[number, marker]), place)
    keys = passes.new[layer.self_attn.target][0]
    groups = queries.shape[1] // keys.shape[1]
    scores = (
        queries[:, :groups] @ keys[:, :1].transpose(2, 3).to(queries.dtype)
    ).float() * config.head_dim**-0.5
    attention, looked = attended(scores, seen[number, 0, marker], b)

    ends = torch.cat([marker, marker + 1], 1)
    logits = model.lm_head(decoder.norm(done.hidden[number, ends])).float()
    answer, right = answered(logits, answers, config.eos_token_id)
    none = answer.new_zeros(())
    return Losses(answer, none, attention, right, none, looked)


class LCKVTrainer(DocsTrainer):
    """Starts at a later level of the curriculum, since docs-lm reads them already."""

    def make_model(self) -> Any:
        twin = twin_from(self.options.start)
        self.progress.level = self.options.level
        return twin if self.options.twin else lckv_from(twin)

    def run(self, batch: Batch, rng: random.Random, done: float) -> Losses:
        if not self.options.twin:
            return run_lckv(self.parts["model"], batch, draw_iterations(rng, done))
        losses = super().run(batch, rng, done)
        # docs-lm binds facts already: fresh heads would only pull its weights about.
        return replace(losses, binding=torch.zeros_like(losses.binding))


def main(arguments: list[str] | None = None) -> None:
    parser = docs_parser("lckv", __doc__, out="runs/docs-lckv", steps=340, tokens=2600, lr=5e-4)
    parser.add_argument("--twin", action="store_true", help="the ordinary Llama of the same layers")
    parser.add_argument("--start", default="docs-lm", help="model whose weights both start from")
    parser.add_argument("--level", type=int, default=3, help="level of the curriculum to start at")
    start(LCKVTrainer, parser, arguments)


if __name__ == "__main__":
    main()

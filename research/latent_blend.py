"""What arranging stored state for a blend moves and takes: latent attention beside ordinary.

    OMP_NUM_THREADS=1 python -m research.latent_blend [--tokens 4000] [--layers 8] [--json FILE]
        [--trained latent=FOLDER --trained ordinary=FOLDER] [--cases 20] [--facts 40]

Random models of one width and number of heads: DeepSeek V3's latent attention with its published
widths (512 latent numbers, 64 rotary ones), ordinary attention, and ordinary attention whose heads
share keys and values in fours. Random state of a prompt is arranged for its passages of 200 tokens
in another order: rows are copied, and what carries positions is turned to its new places.

With `--trained`, models of `research.training.state_kinds` also blend changed documents, the same
ones, at each quality: divergence from full computation, recomputed rows, and processor time.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig
from transformers import PreTrainedTokenizerFast as FastTokenizer

from dejakv.blend.token_map import DonorTokens, TokenMap
from dejakv.engines.tensors import to_store
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.blending import rearrange
from dejakv.trust.differs import divergence
from dejakv_models.docs import KINDS
from research.frontier.bench import Bench, captured_state, scored
from research.frontier.cases import make_case
from research.frontier.cells import CELLS
from research.machine import measured, spread

WORDS, PASSAGE, HEADS, HEAD = 100, 200, 16, 128
COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 1 << 17,
}


def configurations(layers: int) -> dict[str, Any]:
    """Return the models that are compared, by name."""
    common = {**COMMON, "num_hidden_layers": layers}
    return {
        "latent": DeepseekV3Config(
            **common, num_key_value_heads=HEADS, kv_lora_rank=512, q_lora_rank=None,
            qk_rope_head_dim=64, qk_nope_head_dim=HEAD, v_head_dim=HEAD,
            first_k_dense_replace=layers, n_routed_experts=4, n_group=1, topk_group=1,
            num_experts_per_tok=2, moe_intermediate_size=16,
        ),
        "ordinary": LlamaConfig(**common, num_key_value_heads=HEADS, head_dim=HEAD),
        "ordinary, 4 heads of keys": LlamaConfig(**common, num_key_value_heads=4, head_dim=HEAD),
    }  # fmt: skip


def blend_model_of(config: Any) -> Any:
    """Return a random model as a blend sees it.

    Raises
    ------
    ModelError
        It cannot blend.
    """
    vocabulary = {f"w{number}": number for number in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    model = AutoModelForCausalLM.from_config(config).eval()
    blend_model = TransformersEngine(model, FastTokenizer(tokenizer_object=words)).blend_model
    if isinstance(blend_model, Exception):
        raise blend_model
    return blend_model


def measure(tokens: int, layers: int, times: int) -> dict[str, Any]:
    """Return bytes and moved numbers of a token, and milliseconds of the processor, by model."""
    starts = np.random.default_rng(0).permutation(np.arange(0, tokens, PASSAGE))
    order = np.concatenate([np.arange(start, min(tokens, start + PASSAGE)) for start in starts])
    moved_map = TokenMap(order, np.ones(tokens, np.float32), np.zeros(tokens, np.int64))
    donors = DonorTokens.of(list(range(tokens)))

    cases: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    for name, config in configurations(layers).items():
        model = blend_model_of(config)
        ordinary = (2, layers, config.num_key_value_heads, tokens, HEAD)
        shape = ordinary if model.layout is None else (1, 1, 1, tokens, model.layout.width)
        state = torch.randn(shape)
        figures[name] = {
            "token_bytes": state.nbytes // tokens,
            "moved_numbers": sum(view[:, :, 0].numel() for view, _ in model.moving(state)),
        }
        cases[name] = (model, to_store(state))

    spent: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(times + 1):
        for name, (model, state) in cases.items():
            began = time.process_time()
            arranged = rearrange(model, [[(0, state)]], donors, moved_map, "cpu", torch.float32)
            model.layer_states(arranged)
            # The first turn makes the tables.
            spent[name] += [1000 * (time.process_time() - began)] * (turn > 0)
    return {name: figures[name] | {"ms": spread(spent[name])} for name in cases}


@torch.inference_mode()
def blend_quality(folder: str, cases: int, facts: int) -> dict[str, Any]:
    """Blend changed documents on a trained model at each quality.

    Returns
    -------
    dict[str, Any]
        `token_bytes` of the state, `right` of full computation, and by quality: `kl` of the first
        token, `rows` (share recomputed), `ms` of processor time beside `full_ms`, right answers,
        and how many first tokens are those of full computation.
    """
    engine = TransformersEngine.from_pretrained(folder, dtype="fp32")
    bench = Bench(engine)
    cells = [cell for cell in CELLS if cell.quality]
    rows: dict[str, list[dict[str, Any]]] = {cell.name: [] for cell in cells}
    full_ms: list[float] = []
    token_bytes = right = 0
    for kind in KINDS:
        for number in range(cases):
            case = make_case(kind, number, facts, bench.encode)
            states = [captured_state(engine, ids)[1] for ids in case.donors]
            # The first case fills caches, untimed; later ones are timed in turns.
            began = time.process_time()
            full, state, _ = captured_state(engine, case.target)
            full_ms.append(1000 * (time.process_time() - began))
            token_bytes = state.nbytes // len(case.target)
            wanted = scored(full, (0,))
            likeliest = int(wanted[0].argmax())
            right += (likeliest,) == case.answer
            for cell in cells[number % 3 :] + cells[: number % 3]:
                began = time.process_time()
                after, share, _ = bench.blend(case, states, cell)
                spent = 1000 * (time.process_time() - began)
                got = scored(after, (0,))
                rows[cell.name].append(
                    {
                        "kl": float(divergence(wanted, got)[0]),
                        "rows": share,
                        "ms": spent,
                        "right": (int(got[0].argmax()),) == case.answer,
                        "same": int(got[0].argmax()) == likeliest,
                    }
                )
    count = len(full_ms)
    return {
        "cases": count,
        "token_bytes": token_bytes,
        "right": right,
        "full_ms": spread(full_ms[1:]),
        "qualities": {
            name: {
                **{key: spread([row[key] for row in of][1:]) for key in ("kl", "rows", "ms")},
                "kl_mean": sum(row["kl"] for row in of) / count,
                **{key: sum(row[key] for row in of) for key in ("right", "same")},
            }
            for name, of in rows.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--trained", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--cases", type=int, default=20, help="of each kind of change")
    parser.add_argument("--facts", type=int, default=40, help="of a document, 10 tokens each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = measure(options.tokens, options.layers, options.times)
    result = measured("research.latent_blend") | {"models": rows, "trained": {}}
    for named in options.trained:
        name, _, folder = named.partition("=")
        result["trained"][name] = blend_quality(folder, options.cases, options.facts)
        print(name, json.dumps(result["trained"][name]), sep=" | ")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, row in rows.items():
        print(name, row["token_bytes"], row["moved_numbers"], row["ms"], sep=" | ")
    print(json.dumps(result["machine"]))


if __name__ == "__main__":
    main()

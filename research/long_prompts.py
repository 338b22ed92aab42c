"""How each step around a model grows with the prompt: 8,000 to 128,000 tokens.

    OMP_NUM_THREADS=1 python -m research.long_prompts [--tokens 8000,32000,128000] [--json FILE]

A toy model with state of random numbers: what is measured is what DejaKV adds, and not the model.
One stored prompt is asked for again with a question behind it (exact), and once more with its
passages in another order and a word changed in each (blend). Times are seconds of the processor
(`time.process_time`), in turns, beside the bytes that a step allocates in Python and numpy at most.
The last column is the power of the prompt's length by which a step grew: 1 is linear.
"""

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dejakv.blend.settings import BlendConfig
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.plan import ReuseRequest
from dejakv.engines.base import Prepared, StoredDonor
from dejakv.engines.tensors import to_store
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.blending import plan_blend
from dejakv.identity import exact_key
from dejakv.request import Request, Sampling
from dejakv.store import open_store
from dejakv.store.base import RawTensor, StateInfo, StoredState
from research.machine import measured, spread

WORDS, PASSAGE, SENTENCE, QUESTION = 32_000, 400, 20, 30
SHAPE = (2, 2, 1, 16)
"""Keys and values, layers, heads, numbers of a head."""

Row = dict[str, Any]


def toy_engine() -> TransformersEngine:
    """Return an engine of two small layers, whose sentences end with token 0."""
    vocabulary = {".": 0, **{f"w{number}": number for number in range(1, WORDS)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    )
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=32, num_hidden_layers=SHAPE[1],
        num_attention_heads=2, num_key_value_heads=SHAPE[2], head_dim=SHAPE[3],
        max_position_embeddings=1 << 20,
    )  # fmt: skip
    return TransformersEngine(LlamaForCausalLM(config).eval(), tokenizer)


def text(tokens: int, seed: int) -> np.ndarray:
    """Return tokens in which few words are frequent, and each sentence ends with token 0."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.2, tokens), WORDS - 1)
    ids[SENTENCE - 1 :: SENTENCE] = 0
    return ids


def edited(ids: np.ndarray) -> np.ndarray:
    """Return the passages in another order, a word changed in each, and a question behind them."""
    passages = [ids[at : at + PASSAGE].copy() for at in range(0, len(ids), PASSAGE)]
    for number, passage in enumerate(passages):
        passage[len(passage) // 2] = 1 + number % (WORDS - 1)
    order = np.random.default_rng(3).permutation(len(passages))
    return np.concatenate([*(passages[place] for place in order), text(QUESTION, 4)])


def steps_of(
    engine: TransformersEngine, tokens: int, folder: str
) -> dict[str, Callable[[], object]]:
    """Return what is measured on a prompt of so many tokens, by name."""
    ids = text(tokens, 1)
    repeated = tuple(np.concatenate([ids, text(QUESTION, 2)]).tolist())
    state = stored_state(engine, tuple(ids.tolist()))
    store, empty = open_store(folder), open_store(None)
    config = SemanticCacheConfig(reuse="blend")
    cache = HierarchicalCache(store, config=config, background=False)
    assert store.put(state)
    cache.finder.add(state.meta)

    def prepared(token_ids: Sequence[int]) -> Prepared:
        request = Request("r", "t", "t", sampling=Sampling(max_new_tokens=1))
        return Prepared(request, tuple(token_ids), epoch=engine.epoch)

    same, moved = prepared(repeated), prepared(edited(ids).tolist())
    other = prepared(text(tokens, 5).tolist())
    costs = engine.costs()
    prefix = cache.find(same, ReuseRequest("exact")).plan
    assert prefix.method == "prefix", prefix
    assert cache.find(moved, ReuseRequest("blend")).plan.method == "blend"
    donor = StoredDonor(store, state.meta)

    def save() -> None:
        empty.clear()
        assert empty.put(state)

    def blend() -> None:
        planned, report = plan_blend(engine, moved, [donor], BlendConfig())
        assert planned is not None, report

    return {
        "look up: nothing stored": lambda: cache.find(other, ReuseRequest("exact")),
        "look up: prefix, and decide": lambda: cache.find(same, ReuseRequest("exact"), costs=costs),
        "look up: copied text, and decide": lambda: cache.find(
            moved, ReuseRequest("blend"), costs=costs
        ),
        "plan a blend, its state in place": blend,
        "save, in memory": save,
        "load a prefix, and answer": lambda: engine.run(same, prefix, store),
    }


def stored_state(engine: TransformersEngine, ids: tuple[int, ...]) -> StoredState:
    """Return random state of a prompt."""
    import torch

    kinds, layers, heads, width = SHAPE
    meta = StateInfo(
        exact_key("default", engine.epoch, ids, []), "default", engine.epoch, ids, "t", "t"
    )
    tensor: RawTensor = to_store(torch.randn(kinds, layers, heads, len(ids), width))
    return StoredState(meta, tensor)


def measure(engine: TransformersEngine, tokens: int, times: int) -> dict[str, Row]:
    """Return milliseconds of the processor and most bytes of each step."""
    with tempfile.TemporaryDirectory() as folder:
        steps = steps_of(engine, tokens, folder)
        spent: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(times + 1):
            for name, step in steps.items():
                began = time.process_time()
                step()
                # The first turn fills caches.
                spent[name] += [1000 * (time.process_time() - began)] * (turn > 0)
        return {
            name: {"ms": spread(spent[name]), "mib": peak_mib(step)} for name, step in steps.items()
        }


def peak_mib(step: Callable[[], object]) -> float:
    """Return the most memory that Python and numpy allocate for a step; torch's is not counted."""
    tracemalloc.start()
    try:
        step()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def growth(rows: Sequence[float], tokens: Sequence[int]) -> float:
    """Return the power of the length by which the figures grew between the two longest."""
    return float(np.log(rows[-1] / rows[-2]) / np.log(tokens[-1] / tokens[-2]))


def table(sizes: dict[int, dict[str, Row]]) -> str:
    """Return the figures as a table: milliseconds and MiB by length, and their growth."""
    tokens = sorted(sizes)
    lines = [
        f"| step | {' | '.join(f'{n:,} tokens' for n in tokens)} |",
        "|---|" + "---:|" * len(tokens),
    ]
    # Of one length there is no growth.
    if len(tokens) > 1:
        lines = [f"{lines[0]} growth, time and memory |", f"{lines[1]}---:|"]
    for name in sizes[tokens[0]]:
        rows = [sizes[n][name] for n in tokens]
        cells = [
            f"{row['ms']['p50']:.3g} ms ({row['ms']['p10']:.3g} to {row['ms']['p90']:.3g}), "
            f"{row['mib']:.3g} MiB"
            for row in rows
        ]
        line = f"| {name} | {' | '.join(cells)} |"
        if len(tokens) > 1:
            powers = [
                growth(figures, tokens)
                for figures in ([row["ms"]["p50"] for row in rows], [row["mib"] for row in rows])
            ]
            line += f" {powers[0]:.2f}, {powers[1]:.2f} |"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", default="8000,32000,128000")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    engine = toy_engine()
    sizes: dict[int, dict[str, Row]] = {}
    for tokens in map(int, options.tokens.split(",")):
        sizes[tokens] = measure(engine, tokens, options.times)
        print(tokens, "tokens done", file=sys.stderr)
    result = measured("research.long_prompts") | {"tokens": sizes}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(sizes), json.dumps(result["machine"]), sep="\n")


if __name__ == "__main__":
    main()

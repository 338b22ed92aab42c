"""The command: each request in all arms, one after another, then the rules of placing."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.datasets.sessions import SessionsDataset
from dejakv.models import load
from dejakv.models.cache_name import CACHE_NAME
from dejakv.models.loading import load_tokenizer
from dejakv.records import Record
from research.hybrid_sessions.places import (
    Placement,
    Turn,
    aligned,
    at_ends,
    compare,
    on_grid,
    where_prompts_part,
)
from research.hybrid_sessions.streams import Recorded, Talks
from research.machine import measured, spread

ANSWER_TOKENS = 4
STEP_TOKENS = 8192
"""Most tokens of a step of vLLM, its default."""
BUDGET = 8
"""Snapshots in a small budget."""
BUDGETS = (4, 8, 16, 24)
"""Those that are counted alone."""
BLOCKS = (16, 544, 1056)
"""vLLM's blocks that are counted alone: none so short, Qwen3-Next's with state in bf16 and fp32."""

ARMS = ("full", "own cache", "dejakv")


class OwnCaches:
    """The model's own cache of each session, which continues it where its next prompt does."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: dict[str, tuple[list[int], Any]] = {}

    def generate(self, session: str, ids: torch.Tensor, **options: Any) -> tuple[Any, int]:
        """Return the answer, and how many tokens of the prompt were computed."""
        known, cache = self._caches.get(session, ([], None))
        tokens = ids[0].tolist()
        # Fixed state cannot go back, so that an edited prompt is computed in full.
        if not known or tokens[: len(known)] != known or len(known) >= len(tokens):
            known, cache = [], None
        out = type(self._model).generate(
            self._model, ids, **{CACHE_NAME: cache}, return_dict_in_generate=True, **options
        )
        whole = out.sequences[0].tolist()
        # The last token of an answer was not computed.
        self._caches[session] = (whole[:-1], out[CACHE_NAME])
        return out.sequences, len(tokens) - len(known)


def measure(model: Any, tokenizer: Any, stream: Talks | Recorded) -> dict[str, Any]:
    """Serve a stream in all arms, in turns, and count what rules of placing would compute."""
    records: list[Record] = []
    config = SemanticCacheConfig(reuse="exact", semantic_text=False, generated_text="keep")
    own, turns = OwnCaches(model), list[Turn]()
    spent: dict[str, list[float]] = {arm: [] for arm in ARMS}
    computed = dict.fromkeys(ARMS, 0)
    equal = dict.fromkeys(ARMS[1:], 0)
    right = asked = 0
    options = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False}

    with dejakv.attach(model, tokenizer, config, on_record=records.append) as cache:
        alone: Callable[..., Any] = type(model).generate

        for request in stream:
            inputs = tokenizer(request.text, return_tensors="pt", add_special_tokens=False)
            ids = inputs["input_ids"]
            given = {"attention_mask": torch.ones_like(ids), **options}
            answers: dict[str, torch.Tensor] = {}
            # In turns, so that no arm is always the first.
            for arm in ARMS[len(turns) % 3 :] + ARMS[: len(turns) % 3]:
                began = time.process_time()
                if arm == "full":
                    answers[arm], count = alone(model, ids, **given), ids.shape[1]
                elif arm == "own cache":
                    answers[arm], count = own.generate(request.session, ids, **given)
                else:
                    answers[arm] = model.generate(ids, **given)
                    cache.flush()
                    count = records[-1].computed_tokens
                spent[arm].append(1000 * (time.process_time() - began))
                computed[arm] += count

            for arm in equal:
                equal[arm] += int(torch.equal(answers[arm], answers["full"]))
            tokens = answers["full"][0].tolist()
            turns.append(Turn(tuple(tokens), ids.shape[1]))
            answer = tokenizer.decode(tokens[ids.shape[1] :], skip_special_tokens=True).strip()
            stream.tell(tokenizer.decode(tokens[ids.shape[1] :]))
            asked += request.answer is not None
            right += answer == request.answer
            print(len(turns), ids.shape[1], records[-1].reason, file=sys.stderr)
        sizes = snapshot_sizes(cache)

    # vLLM's blocks are so long that one layer's keys and values take what a recurrent layer does.
    linear = model.config.layer_types.count("linear_attention")
    layer_tokens = sizes["snapshot_tokens"] * (len(model.config.layer_types) - linear) / linear
    block = max(16, math.ceil(layer_tokens / 16) * 16)
    prompt_tokens = sum(turn.prompt for turn in turns)
    return {
        "requests": len(turns),
        "prompt_tokens": prompt_tokens,
        "longest": max(turn.prompt for turn in turns),
        "right": {"answers": right, "of": asked},
        "computed": computed,
        "equal": {**equal, "of": len(turns)},
        "ms": {arm: spread(values) for arm, values in spent.items()},
        "seconds": {arm: sum(values) / 1000 for arm, values in spent.items()},
        "ratio": {
            arm: spread([a / b for a, b in zip(spent[arm], spent["full"], strict=True)])
            for arm in ARMS[1:]
        },
        "sizes": sizes,
        "rules": compare(turns, rules_with([block], [BUDGET])),
    }


def rules_with(blocks: Sequence[int], budgets: Sequence[int]) -> dict[str, Placement]:
    """Return the rules of placing, with vLLM's blocks and the most snapshots that are compared."""
    rules = {
        "where prompts part": Placement(where_prompts_part),
        "ends alone": Placement(at_ends),
        "grid of 16": Placement(on_grid(16)),
        "grid of 256": Placement(on_grid(256)),
    }
    for block in blocks:
        rules[f"vLLM's all, blocks of {block}"] = Placement(on_grid(block))
        rules[f"vLLM's align, blocks of {block}"] = Placement(aligned(block, STEP_TOKENS))
    for budget in budgets:
        for order, by_saving in (("saving", True), ("lru", False)):
            for name, places in (
                ("where prompts part", where_prompts_part),
                ("grid", on_grid(256)),
            ):
                rules[f"{name}, {budget} at most, {order}"] = Placement(places, budget, by_saving)
    return rules


def counted(tokenizer: Any, window: int) -> dict[str, Any]:
    """Count the rules on all of `sessions`, with recorded answers, by a chat model's tokens."""
    turns: list[Turn] = []
    for sample in SessionsDataset(window=window, compact_tools=2 if window else None):
        messages = [{"role": role, "content": text} for role, text in sample.messages]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (chat, sample.fields["recorded"])
        )
        turns.append(Turn((*prompt, *answer), len(prompt)))
    tokens = sum(turn.prompt for turn in turns)
    rules = compare(turns, rules_with(BLOCKS, BUDGETS))
    for figures in rules.values():
        figures["share"] = figures["computed"] / tokens
    return {"requests": len(turns), "prompt_tokens": tokens, "rules": rules}


def snapshot_sizes(cache: Any) -> dict[str, int]:
    """Return the bytes of a snapshot and of a token's other state, and the store's of each kind."""
    by_kind: dict[str, list[Any]] = {}
    for meta in cache.store.metas():
        by_kind.setdefault(meta.kind, []).append(meta)
    snapshots = by_kind["snapshot"]
    token_bytes = max(by_kind["kv"], key=lambda meta: meta.num_tokens)
    token = token_bytes.nbytes // token_bytes.num_tokens
    return {
        "snapshot": snapshots[0].nbytes,
        "token": token,
        "snapshot_tokens": snapshots[0].nbytes // token,
        "snapshots": len(snapshots),
        "prompts": len(by_kind["kv"]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a trained hybrid")
    parser.add_argument("--stream", choices=("talks", "sessions"), action="append")
    parser.add_argument(
        "--count", metavar="MODEL", help="count rules on all sessions by this model's tokens, too"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=3, help="of each document")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--facts", type=int, default=56)
    parser.add_argument("--requests", type=int, default=24, help="of `sessions`")
    parser.add_argument("--longest", type=int, default=6000, help="most tokens in `sessions`")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    result: dict[str, Any] = measured("research.hybrid_sessions") | {"streams": {}}
    for name in options.stream or ("talks", "sessions"):
        model, tokenizer = load(options.model, dtype=torch.float32)
        if name == "talks":
            shape = (options.documents, options.sessions, options.turns, options.facts)
            stream: Talks | Recorded = Talks(options.seed, *shape)
        else:

            def count(text: str, tokenizer: Any = tokenizer) -> int:
                return len(tokenizer(text, add_special_tokens=False)["input_ids"])

            # Longer than it was trained for: of its words it knows none here anyway.
            model.config.max_position_embeddings = options.longest + ANSWER_TOKENS
            stream = Recorded(options.seed, options.requests, count, options.longest)
        result["streams"][name] = measure(model, tokenizer, stream)
    if options.count:
        counting = load_tokenizer(options.count)
        result["counted"] = {
            name: counted(counting, window) for name, window in (("whole", 0), ("window of 8", 8))
        }
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

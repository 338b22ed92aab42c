"""How often answers in low precision differ between two computations of one prompt, and what prefilling in pieces costs.

    python benchmarks/precision.py [--model smollm2-135m] [--dtype bf16] [--prompts 32] [--output precision.json]
    python benchmarks/precision.py --times [--output precision_times.json]

Prompts are chats about passages, of different lengths; answers are greedy. Each is asked again, and goes on with another question.
Compared with computing the prompt anew: computing it once more, transformers continued from the prompt's own `DynamicCache` at the
token where prompts part (prefix caching), and hits of DejaKV. `--times` compares misses in pieces with whole prefill, in turns, and
exact hits with misses; run it on an idle machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from exact_hit import machine
from transformers.cache_utils import DynamicCache

import dejakv
from dejakv.engines.transformers import TransformersEngine, decoding
from dejakv.engines.transformers.continuation import copied
from dejakv.engines.transformers.kv import captured, filled_cache
from dejakv.store.base import Tensor

TOPICS = (
    "a lighthouse on a cliff", "bread that is baked at night", "a bridge over a slow river", "the repair of old clocks",
    "a school in the mountains", "ships that carry grain", "a garden behind a wall", "the first snow of the year",
)  # fmt: skip
SENTENCES = (
    "People who live nearby say that {} is the best known thing of the region.", "In 19{} it was painted in another colour.",
    "About {} persons work there in summer, and fewer in winter.", "Visitors ask how long it took to build, and nobody knows.",
    "The council spent {} coins on it, which the newspapers did not like.", "A book of {} pages was written about it.",
)  # fmt: skip
QUESTIONS = (
    "Write one sentence about it.",
    "What do visitors ask?",
    "Why did the newspapers complain?",
    "Tell a short story.",
)


def prompts(tokenizer: Any, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs `[1, n]`: a chat with a question, and the same chat with another question behind it."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(count):
        topic = TOPICS[number % len(TOPICS)]
        lines = [
            SENTENCES[i % 6].format(topic if i % 6 == 0 else 20 + (7 * i + number) % 70)
            for i in range(2 + 11 * (number + 1) % 37)
        ]
        text = f"<|im_start|>user\n{' '.join(lines)} {QUESTIONS[number % 4]}<|im_end|>\n<|im_start|>assistant\n"
        more = f"It is {topic}.<|im_end|>\n<|im_start|>user\n{QUESTIONS[(number + 1) % 4]}<|im_end|>\n<|im_start|>assistant\n"
        first, longer = (torch.tensor([tokenizer(one)["input_ids"]]) for one in (text, text + more))
        made.append((first, longer))
    return made


def asked(model: Any, ids: torch.Tensor, tokens: int, **more: Any) -> Any:
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
        return_dict_in_generate=True, output_scores=True, **more,
    )  # fmt: skip


class Counts:
    """Answers and scores of the first token that differ from those of computing the prompt anew."""

    def __init__(self) -> None:
        self.found = {"pairs": 0, "answers_differ": 0, "first_scores_differ": 0}

    def add(self, anew: Any, other: Any) -> None:
        self.found["pairs"] += 1
        self.found["answers_differ"] += not torch.equal(anew.sequences, other.sequences)
        self.found["first_scores_differ"] += not torch.equal(anew.scores[0], other.scores[0])


def differences(
    engine: TransformersEngine, count: int, tokens: int, told: Callable[[dict[str, object]], None]
) -> dict[str, object]:
    model, names = (
        engine.model,
        ("computed_again", "prefix_caching", "prefix_caching_longer", "dejakv", "dejakv_longer"),
    )
    found = {name: Counts() for name in names}
    lengths: list[int] = []
    report = dict[str, object]()
    for ids, longer in prompts(engine.tokenizer, count):
        n = ids.shape[1]
        lengths.append(n)
        anew, anew_longer = asked(model, ids, tokens), asked(model, longer, tokens)
        found["computed_again"].add(anew, asked(model, ids, tokens))
        for name, given, held, wanted in (
            ("prefix_caching", ids, n - 1, anew), ("prefix_caching_longer", longer, n, anew_longer),
        ):  # fmt: skip
            state = copied(anew.past_key_values, held)
            found[name].add(wanted, asked(model, given, tokens, past_key_values=state))
        with dejakv.attach(model, engine.tokenizer):
            alone = asked(model, longer, tokens)
        with dejakv.attach(model, engine.tokenizer) as cache:
            miss = asked(model, ids, tokens)
            cache.flush()
            found["dejakv"].add(miss, asked(model, ids, tokens))
            found["dejakv_longer"].add(alone, asked(model, longer, tokens))
        print(n, {name: list(counts.found.values()) for name, counts in found.items()}, flush=True)
        report = {"prompt_tokens": lengths, "answer_tokens": tokens, **{name: c.found for name, c in found.items()}}
        told(report)
    return report


@torch.inference_mode()
def prefilled(model: Any, ids: torch.Tensor, piece: int, cache: Any = None) -> Any:
    """A cache with the prompt, computed in pieces (0: whole) behind what it holds."""
    cache = cache if cache is not None else DynamicCache()
    n = ids.shape[1]
    for stop in [*range(piece, n, piece), n] if piece else [n]:
        held = cache.get_seq_length()
        if held < stop:
            decoding.prefill(model, ids[:, :stop], cache, held, None, {})
    return cache


def continued(engine: TransformersEngine, ids: torch.Tensor, state: Tensor, held: int) -> None:
    prefilled(engine.model, ids, 0, filled_cache(state, held, engine.device, engine.model.dtype))


def seconds(run: Callable[..., object], *given: object) -> float:
    begun = time.perf_counter()
    run(*given)
    return time.perf_counter() - begun


def times(engine: TransformersEngine, repeats: int, lengths: list[int]) -> dict[str, object]:
    """Medians of ratios: pieces to whole prefill, and whole prefill to an exact hit at 830 tokens and behind a boundary."""
    model, found = engine.model, dict[str, object]()
    for n in lengths:
        ids = torch.randint(100, 40000, (1, n), generator=torch.Generator().manual_seed(n))
        taken: dict[int, list[float]] = {0: [], 128: [], 256: []}
        for turn in range(repeats + 1):
            for piece, held in taken.items():
                took = seconds(prefilled, model, ids, piece)
                if turn:
                    held.append(took)
        ratios = {
            f"pieces_of_{piece}": round(
                statistics.median(a / b for a, b in zip(taken[piece], taken[0], strict=True)), 3
            )
            for piece in (128, 256)
        }
        found[str(n)] = {"whole_ms": round(1e3 * statistics.median(taken[0]), 1), **ratios}
        print(n, found[str(n)], flush=True)
    for n in (830, 770):
        ids = torch.randint(100, 40000, (1, n), generator=torch.Generator().manual_seed(n))
        state, held = captured(prefilled(model, ids, 256), n), (n - 1) // engine.piece * engine.piece
        held = held if engine.piece > 1 else n - 1
        assert state is not None
        ratios: list[float] = []
        for _ in range(repeats):
            miss = seconds(prefilled, model, ids, engine.piece if engine.piece > 1 else 0)
            hit = seconds(continued, engine, ids, state, held)
            ratios.append(miss / hit)
        found[f"hit_of_{n}"] = {"computed": n - held, "speedup": round(statistics.median(ratios), 1)}
        print(n, found[f"hit_of_{n}"], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="*", default=[200, 830, 2000], help="prompts of --times")
    parser.add_argument("--times", action="store_true", help="what pieces cost, in place of answers that differ")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    engine = TransformersEngine.from_pretrained(options.model, dtype=options.dtype, device="cpu")

    def write(found: dict[str, object]) -> None:
        report = {"model": options.model, "dtype": options.dtype, "machine": machine(), **found}
        if options.output:
            options.output.write_text(json.dumps(report, indent=2) + "\n")

    if options.times:
        write(times(engine, options.repeats, options.lengths))
    else:
        differences(engine, options.prompts, options.tokens, write)


if __name__ == "__main__":
    main()

"""What a free order of passages saves, and what it does to answers, on the `rag` stream.

    OMP_NUM_THREADS=1 python benchmarks/order.py [--prompts 200] [--answers 30] [--passages 4] [--json FILE] [--markdown FILE]

Tokens are counted without a model: every prompt once in the order of its scores, once arranged (`dejakv.arrange`), each
against what came before it in the same way. Rows of a blend are an estimate: what was never computed before, and at least a
fifth of what is behind the exact prefix. Answers are computed in full in both orders, so that nothing but the order differs. A
prompt that nothing would rearrange is read in reverse order. Ctrl-C ends the answers, and what is there is reported.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoTokenizer

from dejakv.datasets.rag import RagDataset
from dejakv.engines.transformers import TransformersEngine
from dejakv.experiments.fidelity import STEPS, Fidelity, fidelity, means
from dejakv.experiments.prompting import Prompter
from dejakv.experiments.scoring import normal
from dejakv.models import tokenizer_folder
from dejakv.part_order import Arrangement, SeenPrompts, arranged
from dejakv.request import Request, Sampling
from dejakv.reuse.quality import DEFAULT, QUALITIES
from dejakv.shares import Shares

MODEL = "smollm2-135m"
Tokenize = Callable[[str], list[int]]


def requests_of(count: int, passages: int, prompter: Prompter) -> list[tuple[Request, str | None]]:
    """Requests with parts, and their right answers."""
    samples = islice(RagDataset(passages=passages, order="free"), count)
    return [(prompter.request(sample, Sampling(STEPS)), sample.answer) for sample in samples]


def arrangements(requests: Sequence[Request], tokenize: Tokenize) -> list[Arrangement]:
    """How each request is arranged when all before it were."""
    seen, found = SeenPrompts(), list[Arrangement]()
    for request in requests:
        found.append(arranged(request.frame, seen, tokenize, request.partition))
        seen.add(tokenize(found[-1].prompt))
    return found


def counted(prompts: Sequence[str], tokenize: Tokenize) -> dict[str, Any]:
    """Shares of a stream's tokens."""
    shares, rows = Shares(), 0.0
    for prompt in prompts:
        share = shares.add(tokenize(prompt))
        least = QUALITIES[DEFAULT].share * (share.tokens - share.prefix)
        rows += max(least, share.tokens - share.anywhere)
    total = shares.total
    return {
        "prompts": len(prompts),
        "tokens": total.tokens,
        "prefix": total.share_prefix,
        "anywhere": total.share_anywhere,
        "computed_exact": 1 - total.share_prefix,
        "computed_blend": rows / total.tokens,
    }


def compared(engine: TransformersEngine, requests: Sequence[tuple[Request, str | None]]) -> dict[str, Any]:
    """Answers in the order given and in another one, all computed in full."""
    found = arrangements([request for request, _ in requests], lambda text: list(ids_of(engine, text)))
    close: list[Fidelity] = []
    first, whole, right, right_other = [], [], [], []
    with suppress(KeyboardInterrupt):
        for (request, answer), best in zip(requests, found, strict=True):
            reverse = tuple(reversed(range(len(request.parts))))
            other = best.of(request).prompt if best.changed else request.frame.prompt(reverse)
            one = engine.run(engine.prepare(request))
            two = engine.run(engine.prepare(plain(other)))
            told = fidelity(one.continued(one.token_ids), two.continued(one.token_ids))
            assert told is not None
            close.append(told)
            first.append(one.token_ids[:1] == two.token_ids[:1])
            whole.append(one.token_ids == two.token_ids)
            if answer:
                right.append(holds(one.text, answer))
                right_other.append(holds(two.text, answer))
            print(f"{request.id}: KL {told.kl:.3f}, top-1 {told.top1:.2f}", file=sys.stderr, flush=True)
    return {
        "prompts": len(close),
        "tokens_mean": mean(best.tokens for best in found[: len(close)]),
        "arranged": sum(best.changed for best in found[: len(close)]),
        **means(close),
        "kl_median": median(item.kl for item in close),
        "same_first_token": mean(first),
        "same_answer": mean(whole),
        "labels": len(right),
        "right_given": mean(right) if right else None,
        "right_other": mean(right_other) if right else None,
    }


def ids_of(engine: TransformersEngine, text: str) -> tuple[int, ...]:
    return engine.prepare(plain(text)).token_ids


def plain(prompt: str) -> Request:
    return Request("other", prompt, prompt, sampling=Sampling(STEPS))


def holds(text: str, answer: str) -> bool:
    """The label or its beginning: 16 tokens seldom hold all of it."""
    return normal(answer)[:24] in normal(text)


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def table(result: dict[str, Any]) -> str:
    """The page of docs/results."""
    lines = [
        "# The order of passages",
        "",
        "| stream | prompts | tokens | prefix | anywhere | computed, exact | computed, blend |",
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for row in result["streams"]:
        figures = " | ".join(
            f"{100 * row[name]:.1f}%" for name in ("prefix", "anywhere", "computed_exact", "computed_blend")
        )
        lines.append(f"| {row['order']} | {row['prompts']} | {row['tokens']:,} | {figures} |")
    lines += ["", f"The search took {result['search_ms']:.1f} ms a prompt, tokenizing included."]
    told = result.get("answers")
    if told:
        right = (
            ""
            if told["right_given"] is None
            else f" Of {told['labels']} answers with a label, {100 * told['right_given']:.0f}% held it in the order given, "
            f"{100 * told['right_other']:.0f}% in the other."
        )
        lines += [
            "",
            f"Answers in the order given and in another one, both computed in full: {told['prompts']} prompts of "
            f"{told['tokens_mean']:,.0f} tokens ({told['arranged']} as they would be arranged, the rest reversed). KL of the "
            f"first token {told['kl_mean']:.3f} (median {told['kl_median']:.3f}), top-1 along 16 tokens "
            f"{100 * told['top1']:.1f}%, same first token {100 * told['same_first_token']:.0f}%, same answer "
            f"{100 * told['same_answer']:.0f}%.{right}",
        ]
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["machine"].items())
    return "\n".join([*lines, "", f"Machine: {about}.", "", f"Command: `{result['command']}`", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--answers", type=int, default=30, help="prompts that a model answers in both orders; 0: none")
    parser.add_argument("--passages", type=int, default=4, help="passages in those prompts; the stream has the default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "command": f"OMP_NUM_THREADS=1 python {' '.join(sys.argv)}"}
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder(MODEL))

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    asked = [request for request, _ in requests_of(given.prompts, RagDataset().passages, Prompter(tokenizer))]
    began = time.perf_counter()
    found = arrangements(asked, tokenize)
    result["search_ms"] = 1e3 * (time.perf_counter() - began) / len(asked)
    result["streams"] = [
        {"order": "given", **counted([request.prompt for request in asked], tokenize)},
        {"order": "free", **counted([best.prompt for best in found], tokenize)},
    ]
    if given.answers:
        engine = TransformersEngine.from_pretrained(MODEL, dtype="fp32")
        result["answers"] = compared(engine, requests_of(given.answers, given.passages, Prompter(tokenizer)))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.markdown:
        given.markdown.write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()

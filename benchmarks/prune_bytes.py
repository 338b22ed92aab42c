"""Bytes of KV that pruning keeps, and what it costs in answers, on documents that docs-lm reads.

    python benchmarks/prune_bytes.py --samples 150 --output docs/results/prune_bytes.json

Every policy keeps at most what the exponential decay from --first to --last allows; `random` is the control at equal bytes.
The question stands at the prompt's end, so the score window sees it (as in SnapKV and in SemShareKV's set-up).
"""

import argparse
import json
import random
from pathlib import Path

import torch
from blend_ttft import machine

from dejakv.datasets.docs import DocsDataset, prompt
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.experiments.scoring import wilson
from dejakv.request import Request
from dejakv.reuse.prune import PrunableDynamicCache, PruneConfig

SETTINGS = (
    ("none", 1.0),
    *((policy, last) for last in (0.5, 0.3, 0.2, 0.1) for policy in ("attention", "snapkv", "random")),
)


@torch.inference_mode()
def measure(model_name: str, samples: int, facts: int, first: float, window: int) -> list[dict]:
    engine = TransformersEngine.from_pretrained(model_name)
    model = engine.model
    cases = []
    for sample in DocsDataset(seed=77, samples=samples, facts=facts, per_document=1):
        text = prompt(sample)
        ids = torch.tensor([engine.prepare(Request(sample.id, text, text)).token_ids])
        wanted = model(input_ids=ids, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
        answer = engine.tokenizer(sample.answer, add_special_tokens=False)["input_ids"][0]
        cases.append((ids, wanted, answer))
    rows = []
    for policy, last in SETTINGS:
        right, kl, held, full = 0, 0.0, 0, 0
        for number, (ids, wanted, answer) in enumerate(cases):
            config = PruneConfig(
                policy,
                max(first, last),
                last,
                window=window,
                minimum=window,
                seed=random.Random(number).randrange(1 << 30),
            )
            cache = PrunableDynamicCache.prefill(model, ids, config)
            held, full = held + cache.nbytes, full + cache.full_bytes
            place = torch.tensor([[ids.shape[1] - 1]])
            got = model(input_ids=ids[:, -1:], past_key_values=cache, position_ids=place).logits[0, -1]
            got = got.float().log_softmax(-1)
            right += int(got.argmax()) == answer
            kl += float((wanted.exp() * (wanted - got)).sum())
        low, high = wilson(right, len(cases))
        rows.append(
            {
                "policy": policy,
                "keep_last": last,
                "n": len(cases),
                "accuracy": round(right / len(cases), 4),
                "lo": round(low, 4),
                "hi": round(high, 4),
                "kl": round(max(0.0, kl / len(cases)), 5),
                "bytes": held // len(cases),
                "saved": round(1 - held / full, 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(report: dict) -> str:
    lines = [
        "# Pruned KV: bytes and answers",
        "",
        f"{report['model']}, documents of {report['facts']} facts, score window {report['window']}, at most {report['first']:.0%} kept in the first "
        f"layer. Bytes are those of the tensors held after pruning. Command: `python benchmarks/prune_bytes.py "
        f"--samples {report['samples']} --facts {report['facts']}`. Machine: {report['machine']}.",
        "",
        "| policy | kept in the last layer, at most | bytes saved | accuracy (95%) | KL | n |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['policy']} | {row['keep_last']:.0%} | {row['saved']:.1%} | {row['accuracy']:.3f} ({row['lo']:.3f}-{row['hi']:.3f}) "
        f"| {row['kl']:.4f} | {row['n']} |"
        for row in report["rows"]
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="docs-lm")
    parser.add_argument("--samples", type=int, default=150)
    parser.add_argument("--facts", type=int, default=40)
    parser.add_argument("--first", type=float, default=0.9)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--output", type=Path, help="JSON file; a Markdown table is written beside it")
    given = parser.parse_args(arguments)
    report = {
        "model": given.model,
        "samples": given.samples,
        "facts": given.facts,
        "first": given.first,
        "window": given.window,
    }
    report |= {
        "machine": machine(),
        "rows": measure(given.model, given.samples, given.facts, given.first, given.window),
    }
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(report, indent=1) + "\n")
        given.output.with_suffix(".md").write_text(table(report))
    return report


if __name__ == "__main__":
    main()

"""Measure a shapes-vlm checkpoint and write its model card: `python -m training.shapes_card runs/shapes`.

Every question goes the ordinary way: PNG, processor, `generate`, decoded text. Scenes are fresh: neither training
nor the curve's validation draws them. Writes `<run>/checkpoint/MODEL_CARD.md` and `curve.json`.
"""

import argparse
import io
import json
import platform
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dejakv.datasets import shapes_language as language
from dejakv.datasets.shapes import prompt
from dejakv.datasets.shapes_programs import KINDS, TYPES, answer, sample
from dejakv.datasets.shapes_render import png, render
from dejakv.datasets.shapes_scene import MAX_THINGS, make_scene
from dejakv.models import load


@dataclass
class Score:
    """Right answers of one kind of question; how the wrong ones were wrong, (expected, given) -> times; and per wording
    how many were right and asked."""

    right: int = 0
    total: int = 0
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter)
    wordings: dict[str, tuple[int, int]] = field(default_factory=dict)


def questions(split: language.Split, per_kind: int, seed: int) -> Iterator[tuple[str, str, str, str, bytes]]:
    """(kind, template, question, right answer, PNG): a new scene for every question, all kinds equally often."""
    for kind in KINDS:
        rng = random.Random(f"test-{seed}-{split}-{kind}")
        for _ in range(per_kind):
            query = None
            while query is None:
                scene = make_scene(rng, rng.randint(2, MAX_THINGS))
                query = sample(scene, rng, kind)
            template = rng.choice(language.templates(kind, split))
            text = language.wording(kind, query.references, template, rng.randrange(language.VARIANTS))
            yield kind, template, text, answer(query, scene), png(render(scene))


def measure(model: Any, processor: Any, split: language.Split, per_kind: int, seed: int = 0) -> dict[str, Score]:
    """Scores by kind. An answer is right if the whole generated text is the expected word."""
    scores = {kind: Score() for kind in KINDS}
    asked = list(questions(split, per_kind, seed))
    for start in range(0, len(asked), 64):
        part = asked[start : start + 64]
        inputs = processor(
            images=[Image.open(io.BytesIO(p)) for *_, p in part],
            text=[prompt(q) for _, _, q, _, _ in part],
            padding=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=4)
        given = processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for (kind, template, _, expected, _), text in zip(part, given, strict=True):
            score, ok = scores[kind], text.strip() == expected
            right, total = score.wordings.get(template, (0, 0))
            score.wordings[template] = (right + ok, total + 1)
            score.total += 1
            score.right += ok
            if not ok:
                score.wrong[expected, text.strip()] += 1
    return scores


def by_type(scores: dict[str, Score]) -> dict[str, Score]:
    """Kinds put together to question types, and `all`: the mean over types, so that none counts for more."""
    merged: dict[str, Score] = {}
    for kind, score in scores.items():
        into = merged.setdefault(TYPES[kind], Score())
        into.right, into.total, into.wrong = (
            into.right + score.right,
            into.total + score.total,
            into.wrong + score.wrong,
        )
    return merged


def overall(merged: dict[str, Score]) -> float:
    """Accuracy, every question type counting the same."""
    return sum(s.right / s.total for s in merged.values()) / len(merged)


def machine() -> str:
    """The processor's name and torch's threads, for beside a number."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'unknown CPU'}, torch {torch.__version__}"


def card(seen: dict[str, Score], held_out: dict[str, Score], curve: list[dict[str, Any]], size: int) -> str:
    """The text of MODEL_CARD.md."""
    a, b = by_type(seen), by_type(held_out)
    rows = [
        f"| {t} | {a[t].right / a[t].total:.3f} | {b[t].right / b[t].total:.3f} | {_worst(a[t], b[t])} |" for t in a
    ]
    steps = [f"| {p['minutes']:.0f} | {p['step']} | {p['accuracy']['all']:.3f} | {_types(p)} |" for p in _thin(curve)]
    last = curve[-1] if curve else {"minutes": 0, "step": 0}
    return CARD.format(
        seen=overall(a),
        held_out=overall(b),
        questions=sum(s.total for s in seen.values()),
        rows="\n".join(rows),
        wordings=_hardest(seen, held_out),
        curve="\n".join(steps),
        machine=machine(),
        minutes=last["minutes"],
        steps=last["step"],
        parameters=size / 1e6,
    )


def _worst(*scores: Score) -> str:
    wrong: Counter[tuple[str, str]] = sum((s.wrong for s in scores), Counter())
    return ", ".join(f"{e} > {g or '(nothing)'} ({n})" for (e, g), n in wrong.most_common(4)) or "none"


def _hardest(*groups: dict[str, Score]) -> str:
    every = [item for scores in groups for score in scores.values() for item in score.wordings.items()]
    every.sort(key=lambda item: item[1][0] / item[1][1])
    return "; ".join(f'"{text}" {right} of {total}' for text, (right, total) in every[:5])


def _thin(curve: list[dict[str, Any]], most: int = 16) -> list[dict[str, Any]]:
    step = max(1, -(-len(curve) // most))
    return curve[::-1][::step][::-1]


def _types(point: dict[str, Any]) -> str:
    return " | ".join(f"{point['accuracy'][t]:.2f}" for t in dict.fromkeys(TYPES.values()))


CARD = """# shapes-vlm

A small vision-language model that ships with DejaKV, so that a cache's effect on answers can be measured offline.
It answers one-word questions about 64x64 pictures of one to six simple things. It knows nothing else.

LLaVA architecture (`LlavaForConditionalGeneration`): CLIP tower (3 layers x 128, patches of 8x8), projector, Llama
decoder (4 layers x 192); {parameters:.2f} M parameters, fp32. A picture is exactly 64 tokens. Prompt (the chat template
makes it of one user message): `<image>` question `<|answer|>`; the answer is one word and `</s>`. Case and spacing of
the question make no difference: the tokenizer removes them. ASCII text is always spelled, never `<unk>`.

## Accuracy

{questions} questions in wordings seen in training and as many in wordings held out from it, all on scenes never
drawn in training; the whole generated text must be the right word. Greedy, fp32. "All" weighs question types alike.

| type | seen wordings | held-out wordings | most frequent errors (right > given) |
|---|---|---|---|
{rows}
| **all** | **{seen:.3f}** | **{held_out:.3f}** | |

Measured by `python -m training.shapes_card runs/shapes` on {machine}.

Wordings answered worst (right of asked): {wordings}.

In vLLM (0.32, CPU, fp32) 300 questions of the stream give the same tokens as in transformers at least 99 times in 100:
`DEJAKV_PARITY_QUESTIONS=300 pytest tests/engines/vllm/test_vllm_bundled_models.py` measures it.

## Training

{minutes:.0f} minutes on one core ({steps} steps of 16 pictures x 12 questions, bf16 autocast) by `make train-shapes`
(`python -m training.shapes`), seed 0, from generated data alone. Auxiliary read-outs (what is in each patch; which
thing a noun phrase names; how two things compare) are trained along and dropped. The recipe, and what changed on the
way, is in `training/README.md`.

Accuracy on validation scenes (2 to 6 things) while it trained; all points are in `curve.json`:

| minutes | steps | all | color | size | shape | exist | count | compare | relation |
|---|---|---|---|---|---|---|---|---|---|
{curve}

## Limits

Pictures of other sizes are resized to 64x64. Scenes of more than six things, things outside the 4x4 grid, several
pictures in one prompt and conversations of several turns were not trained. License: Apache-2.0, as the package.
"""


def main() -> None:
    """Measure, print, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a training run, with checkpoint/ and curve.jsonl")
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = arguments.run / "checkpoint"
    model, processor = load(checkpoint)
    seen = measure(model, processor, "seen", arguments.per_kind)
    held_out = measure(model, processor, "held-out", arguments.per_kind)
    log = arguments.run / "curve.jsonl"
    curve = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    (checkpoint / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
    text = card(seen, held_out, curve, sum(p.numel() for p in model.parameters()))
    (checkpoint / "MODEL_CARD.md").write_text(text)
    for name, scores in (("seen", seen), ("held-out", held_out)):
        merged = by_type(scores)
        print(name, f"all {overall(merged):.4f}", {k: round(s.right / s.total, 3) for k, s in scores.items()})


if __name__ == "__main__":
    main()

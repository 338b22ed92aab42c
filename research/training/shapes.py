"""Train shapes-vlm: `python -m research.training.shapes --minutes 60 --out runs/shapes`.

Resumes from `<out>/state.pt` if it is there. Every `--every` steps a line is added to `<out>/curve.jsonl` and the
averaged weights are written to `<out>/checkpoint`, ready for transformers and vLLM.
"""

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlavaForConditionalGeneration

from dejakv_models.shapes_programs import TYPES
from dejakv_models.shapes_scene import MAX_THINGS
from research.training import state
from research.training.shapes_batches import Batches, adapted
from research.training.shapes_learner import Average, Heads, losses
from research.training.shapes_model import build_model, build_processor, export

STATE = "state.pt"
WARM_UP = 200
LEVELS = ((2, 3), (2, 4), (2, 5), (2, 6), (1, 6))
"""Curriculum: least and most things in a scene."""
ADVANCE_AT = 0.85
"""Running accuracy of training answers at which the next level begins; it begins anyhow after `LEVEL_SHARE`."""
LEVEL_SHARE = 0.06


@dataclass
class Progress:
    """Steps and seconds spent, curriculum level, running accuracy of the training answers: of all, and by kind of question."""

    step: int = 0
    seconds: float = 0.0
    level: int = 0
    accuracy: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict[str, float])


def rate(step: int, done: float, peak: float) -> float:
    """Learning rate at this step, with `done` (0 to 1) of the time used: warm-up, then linearly to zero."""
    return peak * min(1.0, (step + 1) / WARM_UP) * max(0.0, 1.0 - done)


def quick_accuracy(
    model: LlavaForConditionalGeneration, heads: Heads, batches: Batches, device: str, rounds: int
) -> dict[str, float]:
    """Share of right answer words in fp32: by question type, `all`, and `held-out` (wordings not trained on)."""
    right: dict[str, list[bool]] = defaultdict(list)
    with torch.no_grad():
        for split, group in (("seen", "all"), ("held-out", "held-out")):
            for i in range(rounds):
                batch = batches.make(f"validation-{split}-{i}", (2, MAX_THINGS), split).to(device)
                correct = losses(model, heads, batch).correct.tolist()
                right[group] += correct
                for kind, ok in zip(batch.kinds, correct, strict=True):
                    if split == "seen":
                        right[TYPES[kind]].append(ok)
    return {name: round(sum(v) / len(v), 3) for name, v in right.items()}


def train(args: argparse.Namespace) -> None:
    """Train until the minutes are used up."""
    torch.manual_seed(args.seed)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    processor = build_processor()
    model = build_model(processor.tokenizer, args.size).to(args.device)
    heads = Heads(model.config.text_config.hidden_size).to(args.device)
    average = Average(model)
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.peak, betas=(0.9, 0.98), weight_decay=0.01)
    progress, parts = Progress(), {"model": model, "heads": heads, "average": average, "optimizer": optimizer}
    if (out / STATE).exists():
        progress = Progress(**state.load(out / STATE, **parts))
        print(f"resumed at step {progress.step}, {progress.seconds / 60:.1f} minutes", flush=True)
    batches = Batches(processor.tokenizer, args.pictures, args.questions)
    limit, last, reported = args.minutes * 60, time.monotonic(), progress.step
    while progress.seconds < limit and not (args.steps and progress.step >= args.steps):
        done = progress.seconds / limit
        for group in optimizer.param_groups:
            group["lr"] = rate(progress.step, done, args.peak)
        seed, weights = f"train-{args.seed}-{progress.step}", adapted(progress.kinds)
        batch = batches.make(seed, LEVELS[progress.level], weights=weights).to(args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=not args.fp32):
            loss = losses(model, heads, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        average.update(model, progress.step)
        progress.accuracy += 0.02 * (loss.correct.float().mean().item() - progress.accuracy)
        for kind, right in zip(batch.kinds, loss.correct.tolist(), strict=True):
            progress.kinds[kind] = progress.kinds.get(kind, 0.0) * 0.998 + 0.002 * right
        progress.step += 1
        progress.seconds += time.monotonic() - last
        last = time.monotonic()
        mastered = progress.accuracy >= ADVANCE_AT or done >= LEVEL_SHARE * (progress.level + 1)
        if progress.level + 1 < len(LEVELS) and mastered:
            progress.level += 1
            progress.accuracy = min(progress.accuracy, ADVANCE_AT - 0.05)
        if progress.step % args.every == 0:
            _report(args, out, progress, loss, parts, processor, batches)
            reported = progress.step
            progress.seconds += time.monotonic() - last
            last = time.monotonic()
    if reported != progress.step:
        _report(args, out, progress, loss, parts, processor, batches)
    if progress.seconds < limit:
        average.swap(model)  # stopped early; else the rate has come down to zero and the last weights are the best
    export(out / "checkpoint", model, processor)


def _report(args, out, progress, loss, parts, processor, batches) -> None:
    """Measure the averaged weights on fresh scenes, log, export, and save what resuming needs."""
    state.save(out / STATE, progress, **parts)
    model, heads, average = parts["model"], parts["heads"], parts["average"]
    average.swap(model)
    accuracy = quick_accuracy(model, heads, batches, args.device, args.eval_batches)
    export(out / "checkpoint", model, processor)
    average.swap(model)
    line = {
        "step": progress.step,
        "minutes": round(progress.seconds / 60, 2),
        "things": LEVELS[progress.level],
        "loss": {
            "answer": round(loss.answer, 4),
            "patches": round(loss.patches, 4),
            "names": round(loss.references, 4),
        },
        "accuracy": accuracy,
        "training accuracy": {k: round(v, 3) for k, v in progress.kinds.items()},
    }
    with (out / "curve.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps; 0: minutes decide")
    parser.add_argument("--out", default="runs/shapes")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--pictures", type=int, default=16, help="pictures a step")
    parser.add_argument("--questions", type=int, default=12, help="questions behind each picture")
    parser.add_argument("--every", type=int, default=250, help="steps between measurements")
    parser.add_argument("--eval-batches", type=int, default=3)
    parser.add_argument("--peak", type=float, default=8e-4, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fp32", action="store_true", help="no bf16 autocast")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and train."""
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    train(arguments)


if __name__ == "__main__":
    main()

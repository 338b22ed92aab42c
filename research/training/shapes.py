"""Train shapes-vlm: `python -m research.training.shapes --minutes 60 --out runs/shapes`.

Resumes from its folder.
"""

import random
from collections import defaultdict
from typing import Any

import torch

from dejakv_models.shapes_programs import TYPES
from dejakv_models.shapes_scene import MAX_THINGS
from research.training.loop import Trainer, make_parser, start
from research.training.shapes_batches import Batches, adapted
from research.training.shapes_learner import Average, Heads, losses
from research.training.shapes_model import build_model, build_processor, export

LEVELS = ((2, 3), (2, 4), (2, 5), (2, 6), (1, 6))
"""Curriculum: least and most things in a scene."""


class ShapesTrainer(Trainer):
    """A LLaVA, auxiliary heads that are not exported, and the average of its weights."""

    levels = len(LEVELS)
    advance_at, begin_at = 0.85, 0.8
    follow = 0.02

    def make(self) -> dict[str, Any]:
        self.processor = build_processor()
        self.batches = Batches(
            self.processor.tokenizer, self.options.pictures, self.options.questions
        )
        model = build_model(self.processor.tokenizer, self.options.size)
        return {
            "model": model,
            "heads": Heads(model.config.text_config.hidden_size),
            "average": Average(model),
        }

    def rate(self, done: float) -> float:
        """Warm-up over 200 steps, then linearly to zero."""
        return min(1.0, (self.progress.step + 1) / 200) * max(0.0, 1.0 - done)

    def due(self, done: float) -> bool:
        """A level has 6% of the time at most."""
        return done >= 0.06 * (self.progress.level + 1)

    def losses(self, rng: random.Random, done: float) -> tuple[torch.Tensor, float, dict[str, Any]]:
        p = self.progress
        if p.step:
            self.parts["average"].update_parameters(self.parts["model"])
        seed, weights = f"train-{self.options.seed}-{p.step}", adapted(p.kinds)
        batch = self.batches.make(seed, LEVELS[p.level], weights=weights).to(self.options.device)
        found = losses(self.parts["model"], self.parts["heads"], batch)
        for kind, right in zip(batch.kinds, found.correct.tolist(), strict=True):
            p.kinds[kind] = p.kinds.get(kind, 0.0) * 0.998 + 0.002 * right
        figures = {
            "answer": round(found.answer, 4),
            "patches": round(found.patches, 4),
            "names": round(found.references, 4),
        }
        return (
            found.total,
            found.correct.float().mean().item(),
            {"things": LEVELS[p.level], "loss": figures},
        )

    def measured(self) -> dict[str, Any]:
        """Share of right answer words of the averaged weights on fresh scenes, in fp32: by
        question type, `all`, and `held-out` (wordings not trained on).
        """
        right: dict[str, list[bool]] = defaultdict(list)
        model: Any = self.parts["average"].module
        with torch.no_grad():
            for split, group in (("seen", "all"), ("held-out", "held-out")):
                for i in range(self.options.eval_batches):
                    batch = self.batches.make(f"validation-{split}-{i}", (2, MAX_THINGS), split).to(
                        self.options.device
                    )
                    correct = losses(model, self.parts["heads"], batch).correct.tolist()
                    right[group] += correct
                    for kind, ok in zip(batch.kinds, correct, strict=True):
                        if split == "seen":
                            right[TYPES[kind]].append(ok)
        return {
            "measured": {name: round(sum(found) / len(found), 3) for name, found in right.items()}
        }

    def export(self, *, last: bool) -> None:
        """The averaged weights; at the end of the time the last ones, since the rate has come down
        to zero.
        """
        done = last and self.progress.seconds >= 60 * self.options.minutes
        model: Any = self.parts["model"] if done else self.parts["average"].module
        export(self.folder / "model", model, self.processor)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("shapes", __doc__, out="runs/shapes", minutes=60.0, lr=8e-4)
    parser.add_argument("--pictures", type=int, default=16, help="pictures a step")
    parser.add_argument("--questions", type=int, default=12, help="questions behind each picture")
    parser.add_argument("--eval-batches", type=int, default=3)
    start(ShapesTrainer, parser, arguments)


if __name__ == "__main__":
    main()

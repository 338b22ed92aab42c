"""Accuracy of shapes-vlm while it trains: teacher-forced on packed batches of scenes that training never draws."""

from collections import defaultdict

import torch
from transformers import LlavaForConditionalGeneration

from dejakv.datasets.shapes_programs import TYPES
from dejakv.datasets.shapes_scene import MAX_THINGS
from research.training.shapes_batches import Batches
from research.training.shapes_learner import Heads, losses


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

"""Train docs-lckv or its Llama twin from docs-lm: `python -m research.training.lckv`, with `--twin` for the twin.

Resumes from its folder; the documents task, data and losses of `research.training.docs`.
"""

import random
from dataclasses import replace
from typing import Any

import torch

from research.training.docs import Trainer, make_parser
from research.training.docs_data import Batch
from research.training.docs_model import Losses
from research.training.lckv_model import draw_iterations, lckv_from, run_lckv, twin_from


class LCKVTrainer(Trainer):
    """Starts at a later level of the curriculum, since docs-lm reads them already."""

    def make_model(self) -> Any:
        twin = twin_from(self.options.start)
        self.state.level = self.options.level
        return twin if self.options.twin else lckv_from(twin)

    def losses(self, batch: Batch, rng: random.Random, progress: float) -> Losses:
        if not self.options.twin:
            return run_lckv(self.model, batch, draw_iterations(rng, progress))
        losses = super().losses(batch, rng, progress)
        # docs-lm binds facts already: fresh heads would only pull its weights about.
        return replace(losses, binding=torch.zeros_like(losses.binding))


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("research.training.lckv", __doc__, "runs/docs-lckv")
    parser.add_argument("--twin", action="store_true", help="the ordinary Llama of the same layers")
    parser.add_argument("--start", default="docs-lm", help="model whose weights both start from")
    parser.add_argument("--level", type=int, default=3, help="level of the curriculum to start at")
    parser.set_defaults(steps=340, tokens=2600, lr=5e-4)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    LCKVTrainer(options).train()


if __name__ == "__main__":
    main()

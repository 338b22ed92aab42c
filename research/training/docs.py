"""Train docs-lm: `python -m research.training.docs --minutes 45`.

Resumes from its folder; the same command on CPU and CUDA.
"""

import argparse
import random
import shutil
from typing import Any

import torch
from transformers import GenerationConfig

from research.training.docs_data import Batch, make_batch
from research.training.docs_model import Helpers, Losses, build, run
from research.training.docs_tokenizer import save_tokenizer
from research.training.loop import Trainer, make_parser, start

LEVELS = (4, 8, 14, 24, 40, 64, 90, 120, 150, 180)
"""Most facts of a document, step by step: a level is left when enough answers are right."""


def next_batch(
    rng: random.Random,
    level: int,
    done: float,
    tokens: int,
    context: int,
    *,
    talks: float = 0.15,
) -> Batch:
    """A batch of about `tokens` tokens: documents of up to the level's facts, long ones more often
    as time passes, and now and then short ones, lest they be forgotten. `talks`: share of batches
    in which questions see those before them.
    """
    most = min(LEVELS[level], int((context - 60) / 10.5))
    facts = max(2, most - int(most * 0.75 * rng.random() ** (1.0 + done)))
    if rng.random() < 0.2:
        facts = rng.randint(2, max(2, most // 4))
    questions = min(facts, 24)
    return make_batch(
        rng,
        facts,
        max(1, tokens // (facts * 10 + questions * 14)),
        questions,
        context=context,
        stretch=0.7 if done < 0.75 else 0.3,
        turns=rng.random() < talks,
        filler=rng.choice((0.0, 0.15, 0.15, 0.5)),
    )


class DocsTrainer(Trainer):
    """An ordinary Llama, and linear heads that are not exported."""

    levels = len(LEVELS)
    advance_at, begin_at = 0.93, 0.7

    def make(self) -> dict[str, Any]:
        model = self.make_model()
        return {"model": model, "helpers": Helpers(model.config.hidden_size)}

    def make_model(self) -> Any:
        """The model as training begins with it."""
        return build(self.options.size, self.options.context)

    def rate(self, done: float) -> float:
        """Warm-up over 100 steps; constant until 60% of the time, then down to a fiftieth in a
        straight line.
        """
        return min(1.0, (self.progress.step + 1) / 100) * min(1.0, max(0.02, (1.0 - done) / 0.4))

    def due(self, done: float) -> bool:
        """The last levels also come by the clock, so that long documents are seen in time."""
        return self.options.steps is None and done > 0.5 + 0.04 * self.progress.level

    def losses(self, rng: random.Random, done: float) -> tuple[torch.Tensor, float, dict[str, Any]]:
        """The helpers' losses count until 80% of the time and are gone at 95%."""
        o, level = self.options, self.progress.level
        batch = self.batch(rng, done).to(o.device)
        found = self.run(batch, rng, done)
        helping = min(1.0, max(0.0, (0.95 - done) / 0.15))
        figures = {name: round(value.item(), 4) for name, value in vars(found).items()}
        loss = found.answer + helping * (0.5 * found.binding + 0.5 * found.attention)
        return (
            loss,
            found.right.item(),
            {"document_tokens": batch.doc.shape[1], "facts": LEVELS[level], **figures},
        )

    def batch(self, rng: random.Random, done: float) -> Batch:
        """The batch of a step."""
        o = self.options
        return next_batch(rng, self.progress.level, done, o.tokens, o.context)

    def run(self, batch: Batch, rng: random.Random, done: float) -> Losses:
        """One pass over a batch; `rng` draws what is random in it."""
        return run(self.parts["model"], self.parts["helpers"], batch)

    def export(self, *, last: bool) -> None:
        """Replaces the folder's model by this one (fp32 safetensors), complete or not at all."""
        folder, model = self.folder / "model", self.parts["model"]
        new = folder.with_name("model.new")
        shutil.rmtree(new, ignore_errors=True)
        config: Any = model.config
        ids = {
            name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=8, **ids)
        model.save_pretrained(new)
        save_tokenizer(new, config.max_position_embeddings)
        folder.mkdir(exist_ok=True)
        for file in new.iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)
        new.rmdir()


def docs_parser(name: str, about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options of a training on documents."""
    parser = make_parser(
        name, about, **{"minutes": 45.0, "lr": 1e-3, "every": 50, "tokens": 5000, **defaults}
    )
    parser.add_argument("--tokens", type=int, help="tokens a step")
    parser.add_argument("--context", type=int, default=2048)
    return parser


def main(arguments: list[str] | None = None) -> None:
    start(DocsTrainer, docs_parser("docs", __doc__, out="runs/docs-lm"), arguments)


if __name__ == "__main__":
    main()

"""Train docs-lm: `python -m research.training.docs --minutes 45`. Resumes from its folder; the same command on CPU and CUDA."""

import argparse
import json
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from research.training import state
from research.training.docs_data import Batch, make_batch
from research.training.docs_model import SIZES, Helpers, Losses, build, run
from research.training.docs_tokenizer import save_tokenizer

LEVELS = (4, 8, 14, 24, 40, 64, 90, 120, 150, 180)
"""Most facts a document has, step by step: a level is left when enough answers are right."""


@dataclass
class State:
    """Steps and seconds spent, curriculum level, running accuracy at that level, questions asked so far."""

    step: int = 0
    seconds: float = 0.0
    level: int = 0
    accuracy: float = 0.0
    questions: int = 0


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Warm-up over 100 steps; constant until 60% of the time, then down to a fiftieth in a straight line."""
    return peak * min(1.0, (step + 1) / 100) * min(1.0, max(0.02, (1.0 - progress) / 0.4))


def helper_weight(progress: float) -> float:
    """The helpers' losses count until 80% of the time and are gone at 95%."""
    return min(1.0, max(0.0, (0.95 - progress) / 0.15))


def next_batch(rng: random.Random, level: int, progress: float, tokens: int, context: int):
    """A batch of about `tokens` tokens: documents of up to the level's facts, long ones more often as time passes,
    and now and then short ones, lest they be forgotten."""
    most = min(LEVELS[level], int((context - 60) / 10.5))
    facts = max(2, most - int(most * 0.75 * rng.random() ** (1.0 + progress)))
    if rng.random() < 0.2:
        facts = rng.randint(2, max(2, most // 4))
    questions = min(facts, 24)
    documents = max(1, tokens // (facts * 10 + questions * 14))
    return make_batch(
        rng,
        facts,
        documents,
        questions,
        context=context,
        stretch=0.7 if progress < 0.75 else 0.3,
        turns=rng.random() < 0.15,
        filler=rng.choice((0.0, 0.15, 0.15, 0.5)),
    )


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Replace `folder`'s model by this one (fp32 safetensors), complete or not at all."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    c = model.config
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=8,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        pad_token_id=c.pad_token_id,
    )
    model.save_pretrained(new)
    save_tokenizer(new, c.max_position_embeddings)
    folder.mkdir(parents=True, exist_ok=True)
    for file in new.iterdir():
        file.chmod(0o644)
        file.replace(folder / file.name)
    new.rmdir()


class Trainer:
    """The loop with its state on disk: `log.jsonl`, `state.pt`, `model/` (ready to ship)."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options, self.state = options, State()
        self.model = self.make_model().to(options.device)
        self.helpers = Helpers(self.model.config.hidden_size).to(options.device)
        self.parameters = [*self.model.parameters(), *self.helpers.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=options.device == "cpu" or None
        )
        self.folder = Path(options.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.folder / "state.pt"
        self.parts = {"model": self.model, "helpers": self.helpers, "optimizer": self.optimizer}
        if options.fresh:
            (self.folder / "log.jsonl").unlink(missing_ok=True)
        elif self.checkpoint.exists():
            self.state = State(**state.load(self.checkpoint, **self.parts))

    def make_model(self) -> Any:
        """The model as training begins with it."""
        return build(self.options.size, self.options.context)

    def losses(self, batch: Batch, rng: random.Random, progress: float) -> Losses:
        """One pass over a batch; what it draws comes from `rng`."""
        return run(self.model, self.helpers, batch)

    def save(self) -> None:
        """Checkpoint, and the model as it would be shipped."""
        state.save(self.checkpoint, self.state, **self.parts)
        export(self.model, self.folder / "model")

    def log(self, **values: object) -> None:
        line = json.dumps({**asdict(self.state), **values})
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def train_step(self, progress: float) -> tuple[Losses, int]:
        o, s = self.options, self.state
        # Each step's data follow from its number alone, so a resumed run sees what an unbroken one would have seen.
        rng = random.Random(f"{o.seed}/{s.step}")
        batch = next_batch(rng, s.level, progress, o.tokens, o.context).to(o.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(s.step, progress, o.lr)
        # Tiny models are faster without: casting costs more than the products save.
        with torch.autocast(o.device, torch.bfloat16, enabled=o.size != "smoke"):
            losses = self.losses(batch, rng, progress)
            loss = losses.answer + helper_weight(progress) * (0.5 * losses.binding + 0.5 * losses.attention)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        s.step += 1
        s.questions += batch.at.numel()
        s.accuracy = 0.97 * s.accuracy + 0.03 * losses.right.item()
        return losses, batch.doc.shape[1]

    def train(self) -> None:
        o, s = self.options, self.state
        budget = o.minutes * 60
        begin = time.monotonic() - s.seconds
        saved = s.seconds
        while s.seconds < budget and (o.steps is None or s.step < o.steps):
            progress = s.seconds / budget if o.steps is None else s.step / o.steps
            losses, length = self.train_step(progress)
            s.seconds = round(time.monotonic() - begin, 1)
            if s.step % o.log_every == 0:
                parts = {k: round(v.item(), 4) for k, v in vars(losses).items()}
                self.log(document_tokens=length, facts=LEVELS[s.level], **parts)
            # The last levels also come by the clock, so that long documents are seen in time.
            due = o.steps is None and progress > 0.5 + 0.04 * s.level
            if s.level < len(LEVELS) - 1 and (s.accuracy > 0.93 or due):
                s.level += 1
                s.accuracy = min(s.accuracy, 0.7)
            if s.seconds - saved > o.save_every:
                self.save()
                saved = s.seconds
        self.save()


def make_parser(module: str, about: str | None, folder: str) -> argparse.ArgumentParser:
    """The options of a run; `folder` is where it goes by default."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--minutes", type=float, default=45.0, help="time to train, resumed time included")
    parser.add_argument(
        "--steps", type=int, default=None, help="stop after so many steps; the schedule then follows steps"
    )
    parser.add_argument("--out", default=folder, help="folder for checkpoints, log.jsonl and the exported model/")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--tokens", type=int, default=5000, help="tokens a step")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log-every", type=int, default=20, help="steps between two lines of log.jsonl")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between two checkpoints")
    parser.add_argument("--fresh", action="store_true", help="start anew where a checkpoint exists")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = make_parser("research.training.docs", __doc__, "runs/docs-lm").parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    Trainer(options).train()


if __name__ == "__main__":
    main()

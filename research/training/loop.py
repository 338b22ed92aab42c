"""The loop of all trainings: a curriculum, a log, and a checkpoint of everything.

From the checkpoint the same command goes on.
"""

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Progress:
    """Steps and seconds spent, level of the curriculum, running accuracy of the training answers:
    of all, and by kind of question.
    """

    step: int = 0
    seconds: float = 0.0
    level: int = 0
    accuracy: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict[str, float])


class Trainer:
    """One training. Subclasses make the parts, a step's loss, and the files that ship.

    levels   of the curriculum; the next one begins at a running accuracy of `advance_at`, which
             then counts as `begin_at` at most
    follow   how fast the running accuracy follows that of each step
    """

    levels = 1
    advance_at, begin_at = 0.9, 0.8
    follow = 0.03

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options, self.progress = options, Progress()
        self.parts = {name: part.to(options.device) for name, part in self.make().items()}
        self.parameters = [
            one for part in self.parts.values() for one in part.parameters() if one.requires_grad
        ]
        fused = options.device == "cpu" or None
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=fused
        )
        self.folder = Path(options.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.folder / "state.pt"
        if self.checkpoint.exists():
            found = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            for name, part in self._kept().items():
                part.load_state_dict(found[name])
            self.progress = Progress(**found["progress"])
            print(
                f"resumed at step {self.progress.step}, {self.progress.seconds / 60:.1f} minutes",
                flush=True,
            )

    def make(self) -> dict[str, Any]:
        """The model and what helps it learn, as training begins with them."""
        raise NotImplementedError

    def rate(self, done: float) -> float:
        """The learning rate at this step, of its peak.

        `done`: share of the training that is over.
        """
        raise NotImplementedError

    def due(self, done: float) -> bool:
        """Whether the next level begins whatever the accuracy is."""
        raise NotImplementedError

    def losses(self, rng: random.Random, done: float) -> tuple[torch.Tensor, float, dict[str, Any]]:
        """The loss of a fresh batch, the share of right answers in it, and figures for the log."""
        raise NotImplementedError

    def measured(self) -> dict[str, Any]:
        """Figures for the log that are taken at a report alone."""
        return {}

    def export(self, *, last: bool) -> None:
        """Writes the model as it would be shipped. `last`: the training has come to its end."""
        raise NotImplementedError

    def train_step(self, done: float) -> dict[str, Any]:
        """One step; returns its figures."""
        o, p = self.options, self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = o.lr * self.rate(done)
        # Each step's data follow from its number alone, so a resumed run sees what an unbroken one
        # would have seen.
        rng = random.Random(f"{o.seed}/{p.step}")
        # Tiny models are faster without: casting costs more than the products save.
        with torch.autocast(o.device, torch.bfloat16, enabled=o.size == "full"):
            loss, right, figures = self.losses(rng, done)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        p.step += 1
        p.accuracy += self.follow * (right - p.accuracy)
        if p.level < self.levels - 1 and (p.accuracy > self.advance_at or self.due(done)):
            p.level += 1
            p.accuracy = min(p.accuracy, self.begin_at)
        return figures

    def train(self) -> None:
        """Steps until the time, or the steps, are used up."""
        o, p = self.options, self.progress
        begin, figures = time.monotonic() - p.seconds, None
        while p.seconds < 60 * o.minutes and (o.steps is None or p.step < o.steps):
            figures = self.train_step(
                p.seconds / (60 * o.minutes) if o.steps is None else p.step / o.steps
            )
            p.seconds = round(time.monotonic() - begin, 1)
            if p.step % o.every == 0:
                self.report(figures)
                figures = None
        if figures is not None:
            self.report(figures)
        self.export(last=True)

    def report(self, figures: dict[str, Any]) -> None:
        """A checkpoint, complete or not at all; the model as it would be shipped; a line of the
        log.
        """
        partial = self.checkpoint.with_suffix(".partial")
        states = {name: part.state_dict() for name, part in self._kept().items()}
        torch.save({"progress": asdict(self.progress), **states}, partial)
        partial.replace(self.checkpoint)
        self.export(last=False)
        line = json.dumps({**asdict(self.progress), **figures, **self.measured()})
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def _kept(self) -> dict[str, Any]:
        return {**self.parts, "optimizer": self.optimizer}


def make_parser(name: str, about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options of every training. `defaults`: of this one."""
    parser = argparse.ArgumentParser(prog=f"python -m research.training.{name}", description=about)
    parser.add_argument("--minutes", type=float, help="time to train, resumed time included")
    parser.add_argument(
        "--steps", type=int, help="stop after so many steps; the schedule then follows steps"
    )
    parser.add_argument(
        "--out", help="folder for the checkpoint, log.jsonl and the exported model/"
    )
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--lr", type=float, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--every", type=int, default=250, help="steps between two reports")
    parser.set_defaults(**defaults)
    return parser


def start(
    trainer: type[Trainer], parser: argparse.ArgumentParser, arguments: list[str] | None
) -> None:
    """Parses the command line and trains."""
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    trainer(options).train()

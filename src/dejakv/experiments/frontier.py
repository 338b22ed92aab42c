"""The quality frontier of blending: how much must be recomputed before the answers are those of full computation.

Documents of facts are changed in six ways; a donor's state is blended into each changed document at several shares, by
several maps and selectors. Every case is written to `cases.jsonl` as it is done, so a stopped run goes on where it was.
"""

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dejakv.datasets.docs import KINDS, Document, Kind, ask, change, make_document, prompt_of
from dejakv.engines.transformers.blend import plan_cache
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.engines.transformers.kv import captured, plain_cache
from dejakv.errors import ConfigError, ModelError
from dejakv.experiments.frontier_cases import CASES, held_cases, merge, open_cases
from dejakv.experiments.frontier_report import write_report
from dejakv.request import Request
from dejakv.reuse.blend import BlendConfig, find
from dejakv.reuse.need import Need
from dejakv.reuse.selector import Selector
from dejakv.reuse.sentences import sentence_ends
from dejakv.reuse.token_map import Donors, TokenMap
from dejakv.store.base import Tensor

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
COARSE = (0.1, 0.2, 0.5)
WHOLE = (("context", "value"), ("embedding", "kv"), ("align", "kv"))
"""Map and selector, at every share: ours with V compared, the paper's pair (SemShareKV), CacheBlend's in style."""
PAIRS = (
    ("context", "kv"),
    ("context", "similarity"),
    ("context", "query"),
    ("context", "random"),
    ("embedding", "value"),
    ("lsh", "value"),
    ("align", "value"),
)
"""The other maps with the selector that compares V, and the other selectors with the default map, at `COARSE` shares."""


@dataclass(frozen=True)
class Cell:
    """One way of blending.

    budget    `share`: that share of rows, chosen by the selector alone; `within`: whole sentences that changed, as many as
              the share pays for, then the selector; `need`: all that changed, whatever share it takes
    complete  layers computed completely before that
    """

    map: str
    selector: str
    share: float
    budget: str = "share"
    complete: int = 1

    @property
    def name(self) -> str:
        return f"{self.map}/{self.selector}/{self.budget}/{self.complete}/{self.share:g}"

    @property
    def main(self) -> bool:
        """Measured on every case; the other cells on the first `detail` ones only."""
        ours = self.budget != "share" and self.share in (0.0, 0.05, 0.1, 0.2)
        return ours or ((self.map, self.selector) in WHOLE and self.share in (0.1, 0.2))

    @property
    def config(self) -> BlendConfig:
        by_need = self.budget == "need"
        return BlendConfig(
            map=self.map,
            selector=self.selector,
            share=self.share,
            by_need=by_need,
            rule="none" if self.budget == "share" else "changed",
            min_similarity=0.0 if self.budget == "share" else 0.2,
            complete=self.complete,
            max_share=1.0,
        )


def cells(shares: Sequence[float] = SHARES) -> list[Cell]:
    """All cells of the published frontier."""
    partial = [share for share in shares if share < 1.0]
    made = [Cell("context", "similarity", share, "within", 0) for share in partial]
    made += [Cell("context", "similarity", 0.0, "need", 0), Cell("context", "value", 0.0, "need")]
    made += [Cell(map, selector, share) for map, selector in WHOLE for share in partial]
    made += [Cell(map, selector, share) for map, selector in PAIRS for share in partial if share in COARSE]
    return [*made, Cell("context", "value", 1.0)]


@dataclass(frozen=True)
class Case:
    """A question about a changed document, and the donors whose state is at hand. Token ids throughout."""

    kind: Kind
    number: int
    target: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    answer: int
    old_answer: int | None


def make_case(kind: Kind, number: int, facts: int, encode: Callable[[str], tuple[int, ...]], seed: int = 0) -> Case:
    """Follows from its arguments alone. An edit asks about an edited fact; the other kinds ask by turns about what the
    donor states too and what it does not."""
    rng = random.Random(f"frontier/{seed}/{kind}/{number}")
    doc = make_document(rng, facts)
    made = change(kind, doc, rng, questions=2)
    changed = [q for q in made.questions if q.must_change]
    stay = [q for q in made.questions if not q.must_change]
    first, second = (changed, stay) if kind == "edit" or number % 2 == 0 else (stay, changed)
    question = (first or second)[0]
    donors = [doc]
    if kind == "merge":
        donors.append(Document(made.target.sentences[: len(made.target.sentences) - len(doc.sentences)]))
    prompts = tuple(encode(prompt_of(d.text, ask(rng.choice(d.facts), rng))) for d in donors)
    old = question.old_answer if question.must_change else None
    return Case(
        kind,
        number,
        encode(prompt_of(made.target.text, question.text)),
        prompts,
        encode(question.answer)[0],
        encode(old)[0] if old is not None else None,
    )


class Bench:
    """Runs cases on one engine. Raises: ModelError for a model that is not of text alone."""

    def __init__(self, engine: TransformersEngine) -> None:
        if hasattr(engine.model.config, "vision_config") or hasattr(engine.model.config, "audio_config"):
            raise ModelError(
                "the frontier asks about documents, and this model reads more than text: give --model docs-lm"
            )
        self.engine = engine
        self._found: dict[Any, tuple[TokenMap, Need, float]] = {}
        self.layers = engine.model.config.num_hidden_layers
        self.ends = sentence_ends(engine.tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        return self.engine.prepare(Request("frontier", text, text)).token_ids

    @torch.inference_mode()
    def full(self, ids: Sequence[int]) -> tuple[torch.Tensor, Tensor, float]:
        """Log probabilities of the next token, the state, and the seconds to them."""
        given = torch.tensor([list(ids)], device=self.engine.device)
        begun = time.perf_counter()
        cache = plain_cache()
        logits = self.engine.model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        seconds = time.perf_counter() - begun
        state = captured(cache, len(ids))
        assert state is not None
        return logits[0, -1].float().log_softmax(-1), state, seconds

    @torch.inference_mode()
    def blend(
        self, case: Case, states: Sequence[Tensor], config: BlendConfig
    ) -> tuple[torch.Tensor, float, float, float]:
        """Log probabilities, mean share of rows over layers, share in the last layer, seconds (planning included)."""
        donors = Donors.of(*case.donors)
        found, needed, searched = self._find(case, donors, config)
        begun = time.perf_counter()
        planned = plan_cache(
            self.engine.model, case.target, states, donors, found, needed,
            config.schedule_for(self.layers), Selector(config.selector, case.number), threshold=config.threshold,
        )  # fmt: skip
        given = torch.tensor([list(case.target)], device=self.engine.device)
        logits = self.engine.model(
            input_ids=given, past_key_values=planned.cache, use_cache=True, logits_to_keep=1
        ).logits
        seconds = time.perf_counter() - begun + searched
        trace = planned.cache.trace
        return logits[0, -1].float().log_softmax(-1), trace.share, trace.counts[-1] / trace.tokens, seconds

    def _find(self, case: Case, donors: Donors, config: BlendConfig) -> tuple[TokenMap, Need, float]:
        """Map and need with the seconds they took; cells that differ in what comes after share them."""
        limit = None if config.by_need or config.rule == "none" else config.share
        key = (case, config.map, config.rule, config.min_similarity, limit)
        if key not in self._found:
            begun = time.perf_counter()
            target = np.asarray(case.target, dtype=np.int64)
            found, needed = find(target, donors, self.engine.embed_tokens, config, self.ends)
            self._found[key] = found, needed, time.perf_counter() - begun
        return self._found[key]

    def run(self, case: Case, chosen: Sequence[Cell]) -> dict[str, Any]:
        """One line of `cases.jsonl`: by cell [right, KL from full, stale or None, mean share, last share, seconds]."""
        self._found.clear()
        states = [self.full(ids)[1] for ids in case.donors]
        wanted, _, seconds = self.full(case.target)
        rows = {"full": _row(case, wanted, wanted, 1.0, 1.0, seconds)}
        for cell in chosen:
            got, share, last, took = self.blend(case, states, cell.config)
            rows[cell.name] = _row(case, got, wanted, share, last, took)
        return {"kind": case.kind, "number": case.number, "tokens": len(case.target), "rows": rows}


def _row(case: Case, got: torch.Tensor, wanted: torch.Tensor, share: float, last: float, seconds: float) -> list[Any]:
    said = int(got.argmax())
    distance = float((wanted.exp() * (wanted - got)).sum())
    stale = None if case.old_answer is None else said == case.old_answer
    return [
        said == case.answer,
        round(max(0.0, distance), 6),
        stale,
        round(share, 4),
        round(last, 4),
        round(seconds, 6),
    ]


def run_frontier(
    model: str = "docs-lm",
    samples: int = 300,
    output: str | Path = "runs/frontier",
    *,
    facts: int = 16,
    kinds: Sequence[Kind] = KINDS,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    only: Sequence[str] = (),
    detail: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measures and writes `cases.jsonl`, `frontier.json`, `frontier.md` and (with matplotlib) `frontier.png` to `output`.

    samples  cases a kind; only: names of cells, all if empty
    detail   cases a kind on which all cells are measured, the main ones alone on the rest; None: all cells on all cases
    A folder that holds a run of the same settings goes on: cases and cells that are missing are added. One of other settings
    is refused.

    Raises: ConfigError, ModelError.
    """
    if samples < 1 or facts < 2:
        raise ConfigError(f"--samples {samples}, --facts {facts}: give at least 1 sample and 2 facts")
    if detail is not None and detail < 0:
        raise ConfigError(f"--detail {detail} is negative: give 0 or more")
    if not all(math.isfinite(share) and 0 <= share <= 1 for share in shares):
        raise ConfigError(f"shares {tuple(shares)} lie between 0 and 1")
    chosen = [cell for cell in cells(shares) if not only or cell.name in only]
    if only and len(chosen) != len(set(only)):
        known = ", ".join(cell.name for cell in cells(shares))
        raise ConfigError(f"--only names a cell that is not known: choose of {known}")
    folder = open_cases(output)
    bench = Bench(TransformersEngine.from_pretrained(model))
    settings = {"model": Path(model).name, "epoch": bench.engine.epoch, "facts": facts, "seed": seed}
    held = held_cases(folder, settings, [cell.name for cell in chosen])
    todo: list[tuple[Kind, int, list[Cell]]] = []
    for number in range(samples):
        for kind in kinds:
            there = held.get((kind, number), {}).get("rows", {})
            wanted = [cell for cell in chosen if cell.main or detail is None or number < detail]
            missing = [cell for cell in wanted if cell.name not in there]
            if missing or not there:
                todo.append((kind, number, missing))
    with (folder / CASES).open("a", encoding="utf-8") as file:
        for count, (kind, number, missing) in enumerate(todo):
            line = bench.run(make_case(kind, number, facts, bench.encode, seed), missing)
            merge(held, line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            if progress is not None:
                progress(count + 1, len(todo))
    used = [line for line in held.values() if line["number"] < samples and line["kind"] in kinds]
    return write_report(folder, {**settings, "samples": samples}, used, {cell.name: cell for cell in chosen})

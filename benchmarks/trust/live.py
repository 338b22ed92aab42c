"""An error bound live: one stream of requests with a drift in its middle, and what the gate did along it.

    python -m benchmarks.trust.live --before rag --after repo --requests 200 --error-bound 0.05 \\
        --labels docs/results/trust_labels.jsonl --output runs/live.json

The model answers each request behind the gate, and idle time follows each, in which labels are made. What was served approximately is
computed in full once more, apart from the cache: that is the realised error. A gate that begins cold needs hundreds of labels; `--labels`
tells it those of a recorded table first, of the workload before the drift alone. Under a small bound few blends are served: a short stream
shows more under `--error-bound 0.2`. About three seconds a request on one core.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.trust.gates import interval
from benchmarks.trust_labels import BYTES, COSTS
from benchmarks.workloads.machine import machine
from benchmarks.workloads.streams import chosen_of, stream_of

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.datasets.workload import WORKLOADS
from dejakv.errors import DejaKVError
from dejakv.find.bound import BOUND, setting_of
from dejakv.find.decision import Decision
from dejakv.labelling import seen
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.memory import MemoryStore
from dejakv.trust.features import LATE_BLEND, TIME_SHARE
from dejakv.trust.gate import Gate
from dejakv.trust.labels import LabelledHit, read_labels

LENGTHS = {"rag": (120, 400), "repo": (300, 1500), "sessions": (300, 1500)}
"""Tokens of a prompt, as in the recorded table."""


@dataclass(frozen=True)
class Step:
    """One request.

    hit        there was an approximate plan; `served`: it was answered by it; `wrong`: full computation says otherwise
    gate       as it was afterwards, with the number of open rules and of labels, and of alarms so far
    """

    number: int
    drifted: bool
    hit: bool
    served: bool
    wrong: bool
    gate: str
    rules: int
    labels: int
    alarms: int


def steps(pipeline: Pipeline, plain: Pipeline, before: Sequence[Request], after: Sequence[Request]) -> Iterator[Step]:
    """Answers all requests, with idle time behind each. `plain`: the same model without a cache."""
    cache = pipeline.cache
    assert cache is not None
    assert cache.audits is not None
    differs = cache.audits.differs
    for number, request in enumerate(itertools.chain(before, after)):
        answer = pipeline.answer(request)
        decision, served = answer.decision, answer.record.approximate
        wrong = False
        if served:
            tokens = differs.tokens or request.sampling.max_new_tokens
            prepared = plain.engine.prepare(replace(request, sampling=Sampling(tokens)))
            full = plain.engine.run(prepared, sampling=Sampling(tokens))
            given = replace(seen(full), text=answer.text, token_ids=answer.token_ids)
            wrong = differs.wrong(request, seen(full), given)
        while pipeline.run_errand():
            pass
        report = cache.trust(None)
        assert report is not None
        yield Step(
            number, number >= len(before), served or _is_hit(decision), served, wrong,
            report.gate, report.rules, report.explored + report.audited, report.alarms,
        )  # fmt: skip


def _is_hit(decision: Decision | None) -> bool:
    """Whether an approximate plan would have run without the bound."""
    return decision is not None and (
        decision.trial is not None
        or any(way.plan.approximate and way.refused.startswith(BOUND) for way in decision.ways)
    )


def told(gate: Gate, epoch: str, setting: str, hits: Sequence[LabelledHit]) -> int:
    """Tells the gate recorded hits with the margin of their first token, as if they had come before; how many were labelled."""
    labelled = 0
    for hit in hits:
        if hit.margin is None:
            continue
        features = {**hit.features, TIME_SHARE: hit.computed, "first_margin": hit.margin}
        draw = gate.draw(partition="default", epoch=epoch, method=LATE_BLEND, setting=setting, features=features)
        if draw.labelled:
            gate.learn(draw, hit.is_wrong(gate.settings.differs))
            labelled += 1
    return labelled


def figures(taken: Sequence[Step]) -> dict[str, Any]:
    """Before and after the drift: hits, what was served, the realised error with its 95% interval; and how soon the gate closed."""
    found: dict[str, Any] = {}
    for name, part in (
        ("before", [step for step in taken if not step.drifted]),
        ("after", [step for step in taken if step.drifted]),
    ):
        served, wrong = sum(step.served for step in part), sum(step.wrong for step in part)
        found[name] = {
            "requests": len(part), "hits": sum(step.hit for step in part), "served": served, "wrong": wrong,
            "error": wrong / served if served else None, "interval": interval(wrong, served),
            "open": sum(step.gate == "open" for step in part),
        }  # fmt: skip
    first = next((step for step in taken if step.drifted), None)
    alarms = taken[first.number - 1].alarms if first is not None and first.number else 0
    noticed = next((step for step in taken if step.drifted and step.alarms > alarms), None)
    if first is not None and noticed is not None:
        late = taken[first.number : noticed.number + 1]
        found["noticed"] = {
            "requests": len(late), "served": sum(s.served for s in late), "wrong": sum(s.wrong for s in late),
        }  # fmt: skip
    return found


def line(step: Step) -> str:
    """A step in words."""
    what = "wrong" if step.wrong else "served" if step.served else "computed" if step.hit else "no hit"
    return (
        f"{step.number:5} {'after ' if step.drifted else 'before'} {what:8} gate {step.gate}, {step.rules} rules, {step.labels} labels, "
        f"{step.alarms} alarms"
    )


def requests_of(
    workload: str, count: int, given: argparse.Namespace, instruction: str
) -> tuple[list[Request], SemanticCacheConfig, str]:
    """A workload's requests, and the settings and the model that it runs with."""
    options: Mapping[str, int] = {name: int(value) for name, _, value in (one.partition("=") for one in given.set)}
    stream = stream_of(workload, "transformers", count)
    known = {name: value for name, value in options.items() if workload == "rag" or name != "passages"}
    settings = replace(stream.settings, max_samples=40 * count, seed=given.seed, **known)
    samples, prompter, _ = chosen_of(replace(stream, settings=settings, lengths=LENGTHS[workload]))
    made = [prompter.request(sample, Sampling(given.tokens)) for sample in samples]
    if instruction:
        made = [
            replace(one, prompt=f"{instruction}\n\n{one.prompt}", chunk=f"{instruction}\n\n{one.chunk}") for one in made
        ]
    return made, settings.cache, settings.model


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 for a mistake."""
    given = _parser().parse_args(arguments)
    try:
        from dejakv.engines.transformers import TransformersEngine

        before, cache, model = requests_of(given.before, given.requests // 2, given, "")
        after, _, _ = requests_of(given.after, given.requests - given.requests // 2, given, given.instruction)
        config = replace(
            cache, reuse="blend", costs=COSTS, max_generation=0, error_bound=given.error_bound, confidence=given.confidence,
            explore_share=given.explore, audit_share=given.audit, differs=given.differs,
        )  # fmt: skip
        engine = TransformersEngine.from_pretrained(model, dtype="fp32")
        pipeline = Pipeline(engine, build_cache(config, engine, store=MemoryStore(BYTES), background=False))
        assert pipeline.cache is not None
        assert pipeline.cache.gate is not None
        known = [hit for path in given.labels for hit in read_labels(path) if hit.workload in ("", given.before)]
        labels = told(pipeline.cache.gate, engine.epoch, setting_of("blend", config), known)
        taken: list[Step] = []
        for step in steps(pipeline, Pipeline(engine), before, after):
            taken.append(step)
            print(line(step), file=sys.stderr, flush=True)
            found = {
                **{name: value for name, value in vars(given).items() if name not in ("output", "labels")},
                "model": model, "told": labels, **figures(taken), "machine": machine(), "steps": list(map(asdict, taken)),
            }  # fmt: skip
            if given.output:
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(json.dumps(found, indent=1) + "\n")
        pipeline.cache.close()
        print(json.dumps({"told": labels, **figures(taken)}, indent=1))
    except DejaKVError as error:
        print(f"benchmarks.trust.live: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trust.live", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--before", choices=WORKLOADS, default="rag")
    parser.add_argument("--after", choices=WORKLOADS, default="repo")
    parser.add_argument(
        "--instruction", default="", help="text in front of each prompt after the drift, such as another task"
    )
    parser.add_argument("--requests", type=int, default=200, help="half of them before the drift; default 200")
    parser.add_argument("--error-bound", type=float, default=0.05)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--explore", type=float, default=1.0)
    parser.add_argument("--audit", type=float, default=0.1, help="default 0.1: a short stream has few audits")
    parser.add_argument("--differs", default="first")
    parser.add_argument(
        "--labels", type=Path, nargs="*", default=[], help="recorded tables that the gate is told first"
    )
    parser.add_argument("--tokens", type=int, default=4, help="of an answer, default 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=["passages=2"], help="NAME=NUMBER, an option of a workload")
    parser.add_argument("--output", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""What each rule of `dejakv stabilize` adds to prefixes of agents' prompts, and changed answers.

    OMP_NUM_THREADS=1 python -m research.stabilize [--turns 12] [--output FILE.json]

The streams are those of `research.agent_sessions`, and three more: `clock` (a time and a counter in
the system text), `tools` (definitions in another order at each turn) and `passages` (retrieved in
any order). Tokens in prefixes are counted by `dejakv estimate` over all requests, as an unlimited
prefix cache with blocks of 16 serves them. Then SmolLM2 in float32 answers the first turns of
`reminders` and `clock` as they are and with `volatile`, each with exact reuse, and in bf16 as they
are, which is what rounding alone changes.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv import Pipeline, Sampling, SemanticCacheConfig, build_cache
from dejakv.datasets.base import Sample
from dejakv.datasets.messages import read_request
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.experiments.rule_gains import RuleGains, stabilized
from dejakv.experiments.samples import SamplePrompter
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.shares import tokens_of_samples
from dejakv.models import load
from dejakv.stabilize import PrefixStabilizer
from research import agent_sessions
from research.agent_sessions import HEAD, ReadStep, history_of, read_steps, sample_of
from research.command import run
from research.machine import measured

TOOLS = 12
PASSAGES, POOL = 5, 15
ANSWER_TOKENS = 16


def clock(*, seed: int = 0) -> Iterator[Sample]:
    """Yield a session whose system text begins with the time and the number of the step."""
    steps = read_steps(seed, agent_sessions.TURNS)
    for place, step in enumerate(steps):
        now = (
            f"Current time: 10:{place:02d}:{37 * place % 60:02d}\nStep {place + 1} of {len(steps)}"
        )
        messages = (
            ("system", f"{now}\n{HEAD}"),
            *history_of(steps[:place]),
            ("user", step.result),
        )
        yield sample_of("clock", str(step.number), messages, step)


def tools(*, seed: int = 0) -> Iterator[Sample]:
    """Yield a session whose tools, and keys of theirs, come in another order at each turn."""
    order = random.Random(seed)
    steps = read_steps(seed, agent_sessions.TURNS)
    definitions = [_tool(step) for step in read_steps(seed + 1, TOOLS)]
    for place, step in enumerate(steps):
        order.shuffle(definitions)
        said = [("system", HEAD), *history_of(steps[:place]), ("user", step.result)]
        listed = [_shuffled(definition, order) for definition in definitions]
        yield _sample("tools", step, said, {"tools": listed})


def passages(*, seed: int = 0) -> Iterator[Sample]:
    """Yield questions, each behind passages of a pool of which some are asked for more often."""
    draw = random.Random(seed)
    pool = read_steps(seed + 1, POOL)
    for step in read_steps(seed, agent_sessions.TURNS):
        chosen: list[ReadStep] = []
        while len(chosen) < PASSAGES:
            passage = pool[min(int(draw.expovariate(0.25)), POOL - 1)]
            chosen += [passage] if passage not in chosen else []
        documents = "\n".join(f"<document>\n{each.docstring}\n</document>" for each in chosen)
        asked = f"{documents}\nWhat does function {chosen[-1].number} do?"
        yield _sample("passages", step, [("system", HEAD), ("user", asked)], {})


STREAMS: Mapping[str, Callable[..., Iterator[Sample]]] = {
    "reminders": agent_sessions.reminders,
    "compaction": agent_sessions.compaction,
    "subagents": agent_sessions.subagents,
    "clock": clock,
    "tools": tools,
    "passages": passages,
}


def _tool(step: ReadStep) -> dict[str, Any]:
    properties = {
        name: {"type": "string", "description": text}
        for name, text in (("path", "Where to read."), ("query", "What to look for."))
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    about = " ".join(step.docstring.split())[:200]
    return {"name": f"read_{step.number}", "description": about, "parameters": parameters}


def _shuffled(definition: Mapping[str, Any], order: random.Random) -> dict[str, Any]:
    """Return a tool whose schema has its keys in another order, as maps of Go and Rust write it."""
    parameters = list(definition["parameters"].items())
    order.shuffle(parameters)
    return {"type": "function", "function": {**definition, "parameters": dict(parameters)}}


def _sample(
    kind: str, step: ReadStep, said: list[tuple[str, str]], more: Mapping[str, Any]
) -> Sample:
    body = {"messages": [{"role": role, "content": text} for role, text in said], **more}
    messages = tuple((message.role, message.text) for message in read_request(body, kind))
    fields = {**body, "session": kind, "recorded": step.answer}
    return Sample(f"{kind}-{step.number}", messages[-1][1], messages=messages, fields=fields)


def gains_of(stream: Callable[..., Iterator[Sample]], model: str, turns: int) -> list[Any]:
    """Return the rows of `RuleGains` for a stream."""
    tokens_of = tokens_of_samples(RunSettings(model=model))
    gains = RuleGains(tokens_of)
    for sample in islice(stream(), turns):
        gains.add(sample, tokens_of(sample).token_ids, "")
    return gains.figures()


def answers_of(stream: Callable[..., Iterator[Sample]], name: str, turns: int) -> dict[str, Any]:
    """Return tokens computed, and answers that differ, with `volatile` and by rounding alone."""
    model, tokenizer = load(name)
    prompter = SamplePrompter(tokenizer)
    engine = TransformersEngine(model.float(), tokenizer)
    exact = {
        arm: Pipeline(engine, build_cache(SemanticCacheConfig(reuse="exact"), engine))
        for arm in ("as_sent", "volatile")
    }
    rounding = TransformersEngine(load(name)[0].bfloat16(), tokenizer)
    rounded = Pipeline(rounding, build_cache(SemanticCacheConfig(reuse="exact"), rounding))
    stabilizer = PrefixStabilizer(["volatile"])

    counts = {"requests": 0, "prompt_tokens": 0}
    computed = dict.fromkeys(exact, 0)
    equal = {arm: {"first_tokens": 0, "answers": 0} for arm in ("volatile", "bf16")}
    for sample in islice(stream(), turns):
        sent = {"as_sent": sample, "volatile": stabilized(sample, stabilizer)}
        sampling = Sampling(ANSWER_TOKENS)
        answers = {
            arm: pipeline.answer(prompter.request(sent[arm], sampling))
            for arm, pipeline in exact.items()
        }
        answers["bf16"] = rounded.answer(prompter.request(sample, sampling))
        counts["requests"] += 1
        counts["prompt_tokens"] += answers["as_sent"].record.prompt_tokens
        for pipeline in (*exact.values(), rounded):
            pipeline.cache.flush()
        for arm in exact:
            computed[arm] += answers[arm].record.computed_tokens
        expected = answers["as_sent"].token_ids
        for arm, same in equal.items():
            same["first_tokens"] += answers[arm].token_ids[:1] == expected[:1]
            same["answers"] += answers[arm].token_ids == expected
    return {**counts, "computed_tokens": computed, "equal": equal}


def measure(
    output: Annotated[Path | None, typer.Option(help="File for the figures, in JSON.")] = None,
    model: Annotated[str, typer.Option(help="Model that answers.")] = "smollm2-135m",
    turns: Annotated[int, typer.Option(help="Turns of each session that are answered.")] = 12,
) -> None:
    """Measure prefixes and answers with the rules of `dejakv stabilize`."""
    result = measured("research.stabilize") | {
        "model": model,
        "prefixes": {
            name: gains_of(stream, model, agent_sessions.TURNS) for name, stream in STREAMS.items()
        },
        "answers": {
            name: answers_of(STREAMS[name], model, turns) for name in ("reminders", "clock")
        },
    }
    text = json.dumps(result, indent=1)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    typer.echo(text)


if __name__ == "__main__":
    run(measure)

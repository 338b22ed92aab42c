"""Why a sample of a run hit or missed: every candidate of every level, what the guards said, the plan, and what others would cost."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dejakv.build import build_cache, build_levels
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import NO_STATE, Completion, Prepared, costs_of
from dejakv.engines.open import open_templates
from dejakv.errors import ConfigError, DejaKVError
from dejakv.experiments.finished_run import finished_rows, finished_settings
from dejakv.experiments.keys import did_you_mean
from dejakv.experiments.prompting import Prompter
from dejakv.experiments.run import opened, read_samples
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.summary import Row
from dejakv.experiments.watch import Silent, Watch
from dejakv.find.ask import Ask
from dejakv.find.copied.spaces import CopiedText, tokens_from
from dejakv.find.decision import Decision
from dejakv.find.finder import Finder
from dejakv.find.plan import plan
from dejakv.settings import shown
from dejakv.store.memory import MemoryStore

CANDIDATES = 3
"""Candidates of a level that are told, best first, whatever their score."""


WORDS = 12
"""Words of one text alone that are told of a candidate."""


@dataclass(frozen=True)
class Candidate:
    """A donor that a level found. `verdicts`: what each guard said, and the words of one text alone; `trusted`: no guard rejects it."""

    level: str
    sample: str
    chunk: str
    score: float
    verdicts: tuple[str, ...]
    trusted: bool


@dataclass(frozen=True)
class CopiedRun:
    """`length` tokens from `start` on that stand in the prompt of another sample."""

    start: int
    length: int
    sample: str
    text: str


@dataclass(frozen=True)
class Why:
    """`costs`: prompt tokens that each method would compute, None where it has no donor. `recorded`: what the run noted."""

    sample: str
    question: str
    earlier: int
    tokens: int
    prefix: int
    prefix_of: str
    candidates: tuple[Candidate, ...]
    runs: tuple[CopiedRun, ...]
    method: str
    donor: str
    reason: str
    costs: dict[str, int | None]
    recorded: str
    settings: RunSettings


def why(folder: Path, sample_id: str, watch: Watch | None = None) -> Why:
    """Looks the samples of a run up again in its order, up to the one asked for. The decoder does not run.

    Raises: ConfigError for a folder without a finished run and for an unknown sample; DatasetError or ModelError if the data
    set or the model is gone.
    """
    settings = replace(finished_settings(folder), engine="transformers")
    samples = list(read_samples(settings))
    known = tuple(sample.id for sample in samples)
    if sample_id not in known:
        example = f", such as {known[0]}" if known else ""
        raise ConfigError(
            f"the run has no sample {shown(sample_id)}{did_you_mean(sample_id, known)}: give the id of one{example}"
        )
    place, rows, watch = known.index(sample_id), _rows(folder), watch or Silent()
    watch.stage(f"loading {settings.model}")
    with opened(settings) as engine:
        prompter = Prompter(open_templates(settings), settings.prompt_template, settings.chunk_source)
        config = replace(settings.cache, cache_dir=None, error_bound=None)  # nothing runs from which a gate could learn
        cache = build_cache(config, engine, store=MemoryStore(), background=False)
        costs = costs_of(engine, settings.cache.costs)
        watch.stage(f"looking up the samples before {sample_id}")
        for number, sample in enumerate(samples[:place], 1):
            prepared = replace(engine.prepare(prompter.request(sample)), epoch=engine.epoch)
            decision = cache.find(prepared, costs=costs)
            done = Completion(sample.answer or "", (), len(prepared.token_ids), 0, capture=lambda: NO_STATE)
            cache.record(prepared, decision, decision.plan, done)
            row = rows.get(sample.id)
            if row is not None and (agreed := row.agrees("cache")) is not None:
                cache.judged(prepared.request, row.arms["cache"].record, agreed)
            watch.sample(number, place, None)
        prepared = replace(engine.prepare(prompter.request(samples[place])), epoch=engine.epoch)
        decision = cache.find(prepared, costs=costs)
        found = decision.found
        told = Why(
            sample=sample_id,
            question=samples[place].question,
            earlier=place,
            tokens=decision.tokens,
            prefix=found.prefix[0].tokens if found.prefix else 0,
            prefix_of=_name(found.prefix[1]) if found.prefix else "",
            candidates=_candidates(cache, decision, settings.cache, engine),
            runs=_runs(cache, prepared, engine.tokenizer),
            method=decision.plan.method,
            donor=_name(decision.plan.donors[0]) if decision.plan.donors else "",
            reason=decision.plan.reason,
            costs=_costs(decision, settings.cache),
            recorded=_recorded(rows.get(sample_id)),
            settings=settings,
        )
        cache.close()
    return told


def _name(meta: Any) -> str:
    return str(meta.metadata.get("request", meta.id))


def _candidates(
    cache: HierarchicalCache, decision: Decision, config: SemanticCacheConfig, engine: Any
) -> tuple[Candidate, ...]:
    """The best of each level without its thresholds, and what the run's own guards say of them."""
    layers = [":".join(layer.split(":")[:2]) + ":-1" for layer in config.embedding_layers]
    levels = build_levels(replace(config, similarity_threshold=-1.0, embedding_layers=tuple(layers)), engine)
    loose = Finder(cache.store, levels, embed=cache.finder.embed, embedder=cache.finder.embedder)
    loose.fill()
    found: list[Candidate] = []
    for level in levels:
        for match in level.search(decision.query).matches[:CANDIDATES]:
            meta = cache.store.meta(match.donor)
            if meta is None:
                continue
            verdicts = [guard.judge(decision.query.request, meta, match) for guard in cache.finder.guards]
            said = tuple(f"{one.guard} {one.decision}s: {one.reason}" for one in verdicts)
            said += _words_apart(decision.query.text, meta.chunk)
            trusted = any(one.decision == "accept" for one in verdicts) and all(
                one.decision != "reject" for one in verdicts
            )
            found.append(Candidate(match.level, _name(meta), meta.chunk, match.score, said, trusted))
    return tuple(found)


def _words_apart(text: str, other: str) -> tuple[str, ...]:
    """The words that only one of two texts has: guards tell how many, and this page is the owner's, who has both."""
    here, there = dict.fromkeys(text.lower().split()), dict.fromkeys(other.lower().split())
    told: list[str] = []
    for who, words in (
        ("this sample", [w for w in here if w not in there]),
        ("the other", [w for w in there if w not in here]),
    ):
        if words:
            told.append(f"only in {who}: {' '.join(words[:WORDS])}{' ...' if len(words) > WORDS else ''}")
    return tuple(told)


def _runs(cache: HierarchicalCache, prepared: Prepared, tokenizer: Any) -> tuple[CopiedRun, ...]:
    """The runs of tokens that stand in earlier prompts, whether the run's settings use them or not."""
    index = CopiedText(tokens_from(cache.store))
    for meta in cache.store.metas():
        index.add(meta)
    found: list[CopiedRun] = []
    for run in index.search(prepared, prepared.epoch).runs:
        meta = cache.store.meta(run.donor)
        text = tokenizer.decode(list(prepared.token_ids[run.start : run.start + run.length]))
        found.append(CopiedRun(run.start, run.length, _name(meta) if meta else run.donor, text))
    return tuple(found)


def _costs(decision: Decision, config: SemanticCacheConfig) -> dict[str, int | None]:
    tokens, found = decision.tokens, decision.found
    costs: dict[str, int | None] = {"none": tokens, "prefix": tokens - (found.prefix[0].tokens if found.prefix else 0)}
    same = bool(found.donors) and found.donors[0].id == decision.key
    costs["exact"] = 1 if same else None
    piecewise = "top_layer" if config.reuse == "top_layer" else "blend"
    for method in ("adopt", piecewise):
        chosen = plan(tokens, found, Ask(method), share=config.blend.share, tail=config.top_layer_tail).plan
        costs[method] = tokens - chosen.reused if chosen.method == method else None
    return costs


def _rows(folder: Path) -> dict[str, Row]:
    """What the run itself noted, by sample; a dry run has no rows of this kind."""
    try:
        return {row.sample_id: row for row in finished_rows(folder) if "cache" in row.arms}
    except DejaKVError:
        return {}


def _recorded(row: Row | None) -> str:
    if row is None:
        return ""
    record = row.arms["cache"].record
    agrees = {None: "", True: ", the answer of full computation", False: ", another answer than full computation"}
    return f"{record.provenance}, {record.computed_tokens} of {record.prompt_tokens} tokens computed{agrees[row.agrees('cache')]}"

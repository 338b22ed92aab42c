"""Why a sample of a run hit or missed: every candidate of every level, what the guards said, the plan, and what others would cost; for a
terminal and as a page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dejakv.build import build_levels
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.copied.search import CopiedText
from dejakv.decide.finder import Finder
from dejakv.decide.plan import Ask, Decision, choose, exact_plans
from dejakv.engines.base import Prepared
from dejakv.engines.open import open_templates
from dejakv.errors import ConfigError, DejaKVError
from dejakv.experiments.compare import donors_of, opened, pipeline_for, shortened
from dejakv.experiments.estimate import LookUps
from dejakv.experiments.plain_words import counted, short
from dejakv.experiments.report.page import Section, command, facts, page, paragraph, table
from dejakv.experiments.run import cache_folder
from dejakv.experiments.samples import Prompter, read_samples, repeated
from dejakv.experiments.samples_log import finished_rows, finished_settings, finished_summary
from dejakv.experiments.settings import RunSettings, did_you_mean, run_command_of
from dejakv.experiments.summary import Progress, Row
from dejakv.experiments.table import Sheet, say
from dejakv.pipeline import Pipeline
from dejakv.request import Request, reusable
from dejakv.settings import shown

CANDIDATES = 3
"""Candidates of a level that are told, best first, whatever their score."""


@dataclass(frozen=True)
class Candidate:
    """A donor that a level found. `verdicts`: what each guard said; `trusted`: no guard rejects it."""

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
    """costs     prompt tokens that each method would compute, None where it has no donor; of the one that ran, those it computed
    donors    the samples whose state is used, best first; one that gave several chunks is named as often
    recorded  what the run noted, and `differs` what of this is otherwise now; both empty for a dry run
    """

    sample: str
    question: str
    earlier: int
    tokens: int
    prefix: int
    prefix_of: str
    candidates: tuple[Candidate, ...]
    runs: tuple[CopiedRun, ...]
    method: str
    donors: tuple[str, ...]
    reason: str
    costs: dict[str, int | None]
    recorded: str
    differs: str
    settings: RunSettings


def why(folder: Path, sample_id: str, watch: Progress | None = None) -> Why:
    """Repeats a run in its order, up to the sample asked for, so that its cache holds what it held then: the prompts' state, and the
    rows that blends keep. Each prompt is computed as the run did, for an answer of one token; of a dry run nothing is computed.

    Raises: ConfigError for a folder without a finished run, for an unknown sample and for one that could not run; DatasetError or
    ModelError if the data set or the model is gone.
    """
    settings = replace(finished_settings(folder), engine="transformers")
    samples = repeated(tuple(read_samples(settings)), settings.repeat)
    known = tuple(sample.id for sample in samples)
    if sample_id not in known:
        example = f", such as {known[0]}" if known else ""
        raise ConfigError(
            f"the run has no sample {shown(sample_id)}{did_you_mean(sample_id, known)}: give the id of one{example}"
        )
    not_run = finished_summary(folder).get("not_run") or {}
    if sample_id in not_run:
        raise ConfigError(f"sample {shown(sample_id)} could not run: {not_run[sample_id]}; give the id of another")
    place, rows, watch = known.index(sample_id), _rows(folder), watch or Progress()
    able = [sample for sample in samples[:place] if sample.id not in not_run]
    watch.stage(f"loading {settings.model}")
    # Nothing of an earlier cache, and no bound: its gate learns nothing here. Its decisions are in the run's rows.
    alone = replace(settings.cache, cache_dir=None, fusion_cache_dir=None, error_bound=None)
    with opened(settings) as engine, cache_folder(replace(settings, cache=alone)) as inside:
        prompter = Prompter.of(settings, open_templates(settings))
        pipeline = pipeline_for("cache", engine, inside.cache, promotes=settings.promote)
        cache = pipeline.cache
        assert cache is not None
        found = LookUps(cache)
        watch.stage(f"repeating the samples before {sample_id}")
        for number, sample in enumerate(able, 1):
            request, row = prompter.request(sample), rows.get(sample.id)
            if row is None:
                prepared = replace(engine.prepare(request), epoch=engine.epoch)
                found.look_up(prepared, sample.answer, cache.costs(engine))
                cache.flush()
            else:
                _repeat(pipeline, cache, request, row)
            watch.sample(number, len(able), None)
        request, row = prompter.request(samples[place]), rows.get(sample_id)
        computed, donors = None, None
        if row is None:
            decision = _decided(pipeline, cache, request)
            method, reason = decision.plan.method, decision.plan.reason
            donors = tuple(_name(donor) for donor in decision.plan.donors)
        else:
            answer = pipeline.answer(shortened(replace(request, no_store=True)))
            decision = answer.decision or _decided(pipeline, cache, request)
            method, reason, donors = answer.record.method, answer.record.reason, donors_of(answer)
            computed = answer.record.computed_tokens
        recorded, differs = _recorded(row, method, computed, donors)
        donor, prepared = decision.found, pipeline.engine.prepare(decision.query.request)
        told = Why(
            sample=sample_id,
            question=samples[place].question,
            earlier=place,
            tokens=decision.tokens,
            prefix=donor.prefix[0].tokens if donor.prefix else 0,
            prefix_of=_name(donor.prefix[1]) if donor.prefix else "",
            candidates=_candidates(cache, decision, settings.cache, engine),
            runs=_runs(cache, replace(prepared, epoch=pipeline.engine.epoch), engine.tokenizer),
            method=method,
            donors=donors,
            reason=reason,
            costs=_costs(decision, settings.cache, prepared.piece)
            | ({method: computed} if computed is not None else {}),
            recorded=recorded,
            differs=differs,
            settings=settings,
        )
        cache.close()
    return told


def _decided(pipeline: Pipeline, cache: HierarchicalCache, request: Request) -> Decision:
    prepared = replace(pipeline.engine.prepare(request), epoch=pipeline.engine.epoch)
    return cache.find(prepared, costs=cache.costs(pipeline.engine))


def _repeat(pipeline: Pipeline, cache: HierarchicalCache, request: Request, row: Row) -> None:
    """One earlier sample as the run had it: where it was answered exactly, for whatever reason, it is again."""
    record = row.arms["cache"].record
    pipeline.answer(shortened(request if record.approximate else replace(request, reuse="exact")))
    cache.flush()
    if pipeline.promotes and pipeline.promote_one():
        cache.flush()
    if (agreed := row.agrees("cache")) is not None:
        cache.judged(request, record, agreed)


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
            trusted = any(one.decision == "accept" for one in verdicts) and all(
                one.decision != "reject" for one in verdicts
            )
            found.append(Candidate(match.level, _name(meta), meta.chunk, match.score, said, trusted))
    return tuple(found)


def _runs(cache: HierarchicalCache, prepared: Prepared, tokenizer: Any) -> tuple[CopiedRun, ...]:
    """The runs of tokens that stand in earlier prompts, whether the run's settings use them or not."""
    index = CopiedText(cache.store)
    for meta in cache.store.metas():
        index.add(meta)
    found: list[CopiedRun] = []
    for run in index.search(prepared, prepared.epoch).runs:
        meta = cache.store.meta(run.donor)
        text = tokenizer.decode(list(prepared.token_ids[run.start : run.start + run.length]))
        found.append(CopiedRun(run.start, run.length, _name(meta) if meta else run.donor, text))
    return tuple(found)


def _costs(decision: Decision, config: SemanticCacheConfig, piece: int) -> dict[str, int | None]:
    tokens, found = decision.tokens, decision.found
    held = max(way.reused for way in exact_plans(tokens, found, None, piece))
    costs: dict[str, int | None] = {"none": tokens, "prefix": tokens - held}
    same = bool(found.donors) and found.donors[0].id == decision.key
    costs["exact"] = tokens - reusable(tokens, tokens, piece) if same else None
    piecewise = "top_layer" if config.reuse == "top_layer" else "blend"
    for method in ("adopt", piecewise):
        (chosen, *_), _ = choose(tokens, found, Ask(method), replace(config, min_gain=0), piece=piece)
        costs[method] = tokens - chosen.reused if chosen.method == method else None
    return costs


def _rows(folder: Path) -> dict[str, Row]:
    """What the run itself noted, by sample; a dry run has no rows of this kind."""
    try:
        return {row.sample_id: row for row in finished_rows(folder) if "cache" in row.arms}
    except DejaKVError:
        return {}


def _recorded(row: Row | None, method: str, computed: int | None, donors: tuple[str, ...]) -> tuple[str, str]:
    """What the run noted, and where the repetition is another decision than the run's: two plans may take nearly the same time, an error
    bound draws, and the run may have begun with a filled cache. Empty for a dry run."""
    if row is None:
        return "", ""
    outcome = row.arms["cache"]
    record, was = outcome.record, from_donors(outcome.donors)
    agrees = {None: "", True: ", the answer of full computation", False: ", another answer than full computation"}
    noted = f"{record.provenance}, {record.computed_tokens} of {record.prompt_tokens} tokens computed{was}{agrees[row.agrees('cache')]}"
    if (record.method, record.computed_tokens, outcome.donors) == (method, computed, donors):
        return noted, ""
    why = f" ({record.reason})" if record.reason else ""
    before = f"{record.method}, {record.computed_tokens} tokens computed{was}{why}"
    return noted, f"the run decided otherwise: {before}; here {method}, {computed} tokens computed{from_donors(donors)}"


def from_donors(names: Sequence[str]) -> str:
    """`, from 6 donors (rag-3, rag-7)`; empty without donors."""
    if not names:
        return ""
    return f", from {counted(len(names), 'donor')} ({', '.join(dict.fromkeys(names))})"


METHODS = {
    "none": "compute everything", "prefix": "exact prefix", "exact": "exact reuse", "adopt": "adopt the donor's prompt",
    "blend": "blend", "top_layer": "the top layer's state",
}  # fmt: skip


def in_words(found: Why) -> list[str]:
    """What was decided and why, in sentences."""
    lines = [found.differs] if found.differs else []
    lines.append(f"plan: {METHODS[found.method]}{from_donors(found.donors)}")
    if found.reason:
        lines.append(f"why not more: {found.reason}")
    if not found.candidates:
        lines.append(f"no level found any of the {found.earlier} earlier samples")
    copied = sum(run.length for run in found.runs)
    lines.append(
        f"exact prefix: {found.prefix} of {found.tokens} tokens" + (f", from {found.prefix_of}" if found.prefix else "")
        + f"; copied text: {copied} of {found.tokens} tokens in {counted(len(found.runs), 'run')}"
    )  # fmt: skip
    if found.recorded:
        lines.append(f"the run noted: {found.recorded}")
    return lines


def to_terminal(found: Why, console: Console) -> None:
    """Prints the tables and the sentences."""
    say(console, f"{found.sample}: {short(found.question, 300)}")
    for sheet in _sheets(found, 80):
        console.print(sheet.printed())
    say(console, *in_words(found))


def to_html(found: Why) -> str:
    """One self-contained page."""
    about = {"model": found.settings.model, "data set": found.settings.dataset, "earlier samples": found.earlier}
    blocks = [
        paragraph(found.question, *in_words(found)),
        *map(table, _sheets(found, 200)),
        facts(about),
        command(run_command_of(found.settings.named())),
    ]
    title = f"Why {found.sample} was a {'miss' if found.method in ('none', 'prefix') else 'hit'}"
    return page(title, [Section("", blocks)])


def _sheets(found: Why, most: int) -> list[Sheet]:
    """The candidates, the costs and the runs; texts of at most so many characters."""
    candidates = [
        [one.level, f"{one.score:.3f}", "yes" if one.trusted else "no", f"{one.sample}: {short(one.chunk, most)}", "\n".join(one.verdicts)]
        for one in found.candidates
    ]  # fmt: skip
    costs = [
        [
            f"{METHODS[name]}{' (chosen)' if name == found.method else ''}",
            "no donor" if tokens is None else f"{tokens:,}",
        ]
        for name, tokens in found.costs.items()
    ]
    runs = [[f"{run.start} to {run.start + run.length}", run.sample, short(run.text, most)] for run in found.runs]
    title = f"nearest of {found.earlier} earlier samples, by level"
    return [
        Sheet(title, ("level", "score", "trusted", "sample", "guards"), candidates),
        Sheet("what each method computes", ("method", f"tokens of {found.tokens}"), costs),
        *([Sheet("tokens that stand in earlier samples", ("tokens", "stand in", "text"), runs)] if runs else []),
    ]

"""Why a sample of a run hit or missed: every candidate of every level, what the guards said, and the plans; for a
terminal and as a page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dejakv.build import build_levels
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.finder import DonorFinder
from dejakv.decide.plan import Decision
from dejakv.engines.open import open_templates
from dejakv.errors import ConfigError, counted
from dejakv.experiments.compare import donors_of, opened, pipeline_for, replay, shortened
from dejakv.experiments.plain_words import short
from dejakv.experiments.reports.report import ReportSection, command, drawn, facts, page
from dejakv.experiments.run import cache_folder
from dejakv.experiments.samples import SamplePrompter, read_samples, repeated
from dejakv.experiments.samples_log import finished_rows, finished_settings, finished_summary
from dejakv.experiments.settings import RunSettings, did_you_mean, run_command_of
from dejakv.experiments.summary import RunProgress, SampleRow
from dejakv.experiments.table import Block, TextTable, print_blocks
from dejakv.settings import shown

CANDIDATES = 3
"""Candidates of a level that are told, best first, whatever their score."""


@dataclass(frozen=True)
class DonorCandidate:
    """A donor found by a level. `verdicts`: the guards' answers; `trusted`: no guard rejects it."""

    level: str
    sample: str
    chunk: str
    score: float
    verdicts: tuple[str, ...]
    trusted: bool


@dataclass(frozen=True)
class SampleExplanation:
    """The explanation of one sample.

    donors    the samples whose state is used, best first; repeated for each of their chunks
    decision  everything considered, with the exact prefix and copied text found
    recorded  the run's own record, empty if it had no cache
    """

    sample: str
    question: str
    earlier: int
    candidates: tuple[DonorCandidate, ...]
    method: str
    computed: int
    donors: tuple[str, ...]
    reason: str
    decision: Decision
    recorded: str
    settings: RunSettings


def why(folder: Path, sample_id: str, watch: RunProgress | None = None) -> SampleExplanation:
    """Repeats a run in its order, up to the sample asked for, so that its cache holds what it held then: the prompts' state, and the
    rows that blends keep. Each prompt is computed as the run did, for an answer of one token.

    Raises: ConfigError for a folder without a finished live run, for an unknown sample and for one that could not run; DatasetError or
    ModelError if the data set or the model is gone.
    """
    settings = replace(finished_settings(folder), engine="transformers")
    samples = repeated(tuple(read_samples(settings)), settings.repeat)
    sample_ids = tuple(sample.id for sample in samples)
    if sample_id not in sample_ids:
        example = f", such as {sample_ids[0]}" if sample_ids else ""
        raise ConfigError(
            f"the run has no sample {shown(sample_id)}{did_you_mean(sample_id, sample_ids)}: give the id of one{example}"
        )
    not_run = finished_summary(folder).get("not_run") or {}
    if sample_id in not_run:
        raise ConfigError(f"sample {shown(sample_id)} could not run: {not_run[sample_id]}; give the id of another")

    place, watch = sample_ids.index(sample_id), watch or RunProgress()
    rows = {row.sample_id: row for row in finished_rows(folder) if "cache" in row.arms}
    able = [sample for sample in samples[:place] if sample.id not in not_run]
    watch.stage(f"loading {settings.model}")
    # Nothing of an earlier cache, and no bound: its gate learns nothing here. Its decisions are in the run's rows.
    alone = replace(settings.cache, store=None, disk_dir=None, fusion_cache_dir=None, error_bound=None)
    with opened(settings) as engine, cache_folder(replace(settings, cache=alone)) as inside:
        prompter = SamplePrompter.of(settings, open_templates(settings))
        pipeline = pipeline_for("cache", engine, inside.cache, promotes=settings.promote)
        cache = pipeline.cache
        assert cache is not None
        watch.stage(f"repeating the samples before {sample_id}")
        # All of them in order: what a cache holds, and what a bound draws, depends on each.
        for number, sample in enumerate(able, 1):
            ran = rows.get(sample.id)
            replay(pipeline, prompter.request(sample), ran.arms["cache"] if ran is not None else None)
            watch.sample(number, len(able), None)
        # Not stored, so that the levels are searched below as they were for this sample.
        answer = pipeline.answer(shortened(replace(prompter.request(samples[place]), no_store=True)))
        if answer.decision is None:
            raise ConfigError(f"nothing of {settings.model} is reused: {answer.record.reason}")

        explanation = SampleExplanation(
            sample=sample_id,
            question=samples[place].question,
            earlier=place,
            candidates=_candidates(cache, answer.decision, settings.cache, engine),
            method=answer.record.method,
            computed=answer.record.computed_tokens,
            donors=donors_of(answer),
            reason=answer.record.reason,
            decision=answer.decision,
            recorded=_recorded(rows[sample_id]) if sample_id in rows else "",
            settings=settings,
        )
        cache.close()

    return explanation


def _name(meta: Any) -> str:
    return str(meta.metadata.get("request", meta.id))


def _candidates(
    cache: HierarchicalCache, decision: Decision, config: SemanticCacheConfig, engine: Any
) -> tuple[DonorCandidate, ...]:
    """The best of each level without its thresholds, and what the run's own guards say of them."""
    # -1 is the least cosine: candidates under the run's threshold are shown too.
    layers = [":".join(layer.split(":")[:2]) + ":-1" for layer in config.embedding_layers]
    levels = build_levels(replace(config, similarity_threshold=-1.0, embedding_layers=tuple(layers)), engine)
    loose = DonorFinder(cache.store, levels, embed=cache.finder.embed, embedder=cache.finder.embedder)
    # New indexes hold nothing until they are filled from the store.
    loose.fill()
    candidates: list[DonorCandidate] = []
    for level in levels:
        for match in level.search(decision.query).matches[:CANDIDATES]:
            meta = cache.store.meta(match.donor)
            if meta is None:
                continue
            verdicts = [guard.judge(decision.query.request, meta, match) for guard in cache.finder.guards]
            verdict_texts = tuple(f"{verdict.guard} {verdict.decision}s: {verdict.reason}" for verdict in verdicts)
            trusted = any(verdict.decision == "accept" for verdict in verdicts) and all(
                verdict.decision != "reject" for verdict in verdicts
            )
            candidates.append(DonorCandidate(match.level, _name(meta), meta.chunk, match.score, verdict_texts, trusted))

    return tuple(candidates)


def _recorded(row: SampleRow) -> str:
    """What the run noted. Its plan may be another: two may take nearly the same time, an error bound draws, and a cache folder may have
    held more."""
    record = row.arms["cache"].record
    agrees = {None: "", True: ", the answer of full computation", False: ", another answer than full computation"}
    return (
        f"{record.provenance}, {record.computed_tokens} of {record.prompt_tokens} tokens computed"
        f"{from_donors(row.arms['cache'].donors)}{agrees[row.agrees('cache')]}"
    )


def from_donors(names: Sequence[str]) -> str:
    """`, from 6 donors (rag-3, rag-7)`; empty without donors."""
    if not names:
        return ""
    return f", from {counted(len(names), 'donor')} ({', '.join(dict.fromkeys(names))})"


def in_words(explanation: SampleExplanation) -> list[str]:
    """What was decided and why, in sentences."""
    decision, donor_search = explanation.decision, explanation.decision.found
    lines = [
        f"plan: {explanation.method}, {explanation.computed} of {decision.tokens} tokens computed{from_donors(explanation.donors)}"
    ]
    if explanation.reason:
        lines.append(f"why not more: {explanation.reason}")
    lines.append(f"considered: {', '.join(map(str, decision.considered))}")
    if not explanation.candidates:
        lines.append(f"no level found any of the {explanation.earlier} earlier samples")
    prefix_text = (
        f"{donor_search.prefix[0].tokens} tokens, from {_name(donor_search.prefix[1])}"
        if donor_search.prefix
        else "none"
    )
    copied = sum(length for _, length in donor_search.runs)
    lines.append(
        f"exact prefix: {prefix_text}; copied text: {copied} tokens in {counted(len(donor_search.runs), 'run')}"
    )

    if explanation.recorded:
        lines.append(f"the run noted: {explanation.recorded}")
    return lines


def to_terminal(explanation: SampleExplanation, console: Console) -> None:
    """Prints the table and the sentences."""
    print_blocks(parts(explanation), console)


def to_html(explanation: SampleExplanation) -> str:
    """One self-contained page."""
    about = {
        "model": explanation.settings.model,
        "data set": explanation.settings.dataset,
        "earlier samples": explanation.earlier,
    }
    blocks = [drawn(parts(explanation)), facts(about), command(run_command_of(explanation.settings.named()))]
    title = f"Why {explanation.sample} was a {'miss' if explanation.method in ('none', 'prefix') else 'hit'}"
    return page(title, [ReportSection("", blocks)])


def parts(explanation: SampleExplanation) -> list[Block]:
    """The question, the candidates and the decision."""
    rows = [
        [candidate.level, f"{candidate.score:.3f}", "yes" if candidate.trusted else "no", f"{candidate.sample}: {short(candidate.chunk, 200)}", "\n".join(candidate.verdicts)]
        for candidate in explanation.candidates
    ]  # fmt: skip

    title = f"nearest of {explanation.earlier} earlier samples, by level"
    candidates = TextTable(title, ("level", "score", "trusted", "sample", "guards"), rows)
    return [f"{explanation.sample}: {short(explanation.question, 600)}", candidates, *in_words(explanation)]

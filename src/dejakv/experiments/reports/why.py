"""Why a sample of a run hit or missed, for a terminal and as a page.

It tells the best candidates of every level, what the guards said, and the plans.
"""

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
from dejakv.errors import ConfigError, count_noun
from dejakv.experiments.compare import donors_of, engine_context, pipeline_for, replay, shortened
from dejakv.experiments.reports.plain_words import short
from dejakv.experiments.reports.report import ReportSection, command, drawn, facts, page
from dejakv.experiments.run import cache_folder
from dejakv.experiments.samples import SamplePrompter, read_samples, repeated
from dejakv.experiments.samples_log import finished_rows, finished_settings, finished_summary
from dejakv.experiments.settings import RunSettings, did_you_mean, run_command_of
from dejakv.experiments.summary import RunProgress, SampleRow
from dejakv.experiments.table import Block, TextTable, print_blocks
from dejakv.settings import display

CANDIDATES = 3
"""Candidates of a level that are told, best first, whatever their score."""


@dataclass(frozen=True)
class DonorCandidate:
    """Donor that a level proposes.

    Attributes
    ----------
    level : str
        Name of the level.
    sample : str
        Id of the earlier sample.
    chunk : str
        Text that was compared.
    score : float
        The level's score, higher is nearer.
    verdicts : tuple[str, ...]
        Answers of the guards.
    trusted : bool
        Whether a guard accepts the donor and none rejects it.
    """

    level: str
    sample: str
    chunk: str
    score: float
    verdicts: tuple[str, ...]
    trusted: bool


@dataclass(frozen=True)
class SampleExplanation:
    """Explanation of one sample.

    Attributes
    ----------
    sample : str
        Id of the sample.
    question : str
        Its question.
    earlier : int
        Number of samples before it.
    candidates : tuple[DonorCandidate, ...]
        The best candidates of each level.
    method : str
        Method of reuse that ran.
    computed : int
        Tokens that were computed.
    donors : tuple[str, ...]
        Samples whose state is used, best first, repeated for each of their segments.
    reason : str
        Why no more was reused.
    decision : Decision
        Everything considered, with the exact prefix and copied text.
    recorded : str
        What the run noted about the sample, empty if it had no cache.
    settings : RunSettings
        Settings of the run.
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


def explain_sample(
    folder: Path, sample_id: str, watch: RunProgress | None = None
) -> SampleExplanation:
    """Repeat a run in its order up to one sample, and explain what happens to that sample.

    The cache begins empty, whatever the run's began with, and holds then what the run's held: the
    prompts' state, and the rows that blends keep. Each prompt is computed as the run did, for an
    answer of one token, by the transformers engine and without an error bound.

    Parameters
    ----------
    folder : Path
        Output folder of a finished live run.
    sample_id : str
        The sample to explain.
    watch : RunProgress, optional
        Observer of stages and samples.

    Raises
    ------
    ConfigError
        For a folder without a finished live run, for an unknown sample, for one that could not run,
        and for a model of which nothing is reused.
    DatasetError, ModelError
        If the data set or the model is gone.
    """
    settings = replace(finished_settings(folder), engine="transformers")
    samples = repeated(tuple(read_samples(settings)), settings.repeat)
    sample_ids = tuple(sample.id for sample in samples)
    if sample_id not in sample_ids:
        example = f", such as {sample_ids[0]}" if sample_ids else ""
        raise ConfigError(
            f"the run has no sample {display(sample_id)}{did_you_mean(sample_id, sample_ids)}: give"
            f" the id of one{example}"
        )
    not_run = finished_summary(folder).get("not_run") or {}
    if sample_id in not_run:
        raise ConfigError(
            f"sample {display(sample_id)} could not run: {not_run[sample_id]}; give the id of"
            " another"
        )

    place, watch = sample_ids.index(sample_id), watch or RunProgress()
    rows = {row.sample_id: row for row in finished_rows(folder) if "cache" in row.arms}
    able = [sample for sample in samples[:place] if sample.id not in not_run]
    watch.stage(f"loading {settings.model}")

    # Nothing of an earlier cache, and no bound: its gate learns nothing here, and its decisions
    # are in the run's rows.
    alone = replace(
        settings.cache, store=None, disk_dir=None, fusion_cache_dir=None, error_bound=None
    )
    with engine_context(settings) as engine, cache_folder(replace(settings, cache=alone)) as inside:
        prompter = SamplePrompter.for_run(settings, open_templates(settings))
        pipeline = pipeline_for("cache", engine, inside.cache, promotes=settings.promote)
        cache = pipeline.cache
        assert cache is not None
        watch.stage(f"repeating the samples before {sample_id}")
        # All of them in order: what a cache holds, and what a bound draws, depends on each.
        for number, sample in enumerate(able, 1):
            ran = rows.get(sample.id)
            replay(
                pipeline, prompter.request(sample), ran.arms["cache"] if ran is not None else None
            )
            watch.sample(number, len(able), None)
        # Not stored, so that the levels are searched below as they were for this sample.
        answer = pipeline.answer(
            shortened(replace(prompter.request(samples[place]), no_store=True))
        )
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
    """Return the best of each level without thresholds, and what the run's guards say of them."""
    # -1 is the least cosine: candidates under the run's threshold are shown too.
    layers = [":".join(layer.split(":")[:2]) + ":-1" for layer in config.embedding_layers]
    levels = build_levels(
        replace(config, similarity_threshold=-1.0, embedding_layers=tuple(layers)), engine
    )

    loose = DonorFinder(
        cache.store, levels, embed=cache.finder.embed, embedder=cache.finder.embedder
    )

    # New indexes hold nothing until they are filled from the store.
    loose.fill()

    candidates: list[DonorCandidate] = []
    for level in levels:
        for match in level.search(decision.query).matches[:CANDIDATES]:
            meta = cache.store.meta(match.donor)
            if meta is None:
                continue

            verdicts = [
                guard.judge(decision.query.request, meta, match) for guard in cache.finder.guards
            ]
            verdict_texts = tuple(
                f"{verdict.guard} {verdict.decision}s: {verdict.reason}" for verdict in verdicts
            )
            trusted = any(verdict.decision == "accept" for verdict in verdicts) and all(
                verdict.decision != "reject" for verdict in verdicts
            )
            candidates.append(
                DonorCandidate(
                    match.level, _name(meta), meta.chunk, match.score, verdict_texts, trusted
                )
            )

    return tuple(candidates)


def _recorded(row: SampleRow) -> str:
    """Say what the run noted about a sample.

    Its plan may be another one than now: two may take nearly the same time, an error bound draws,
    and a cache folder may have held more.
    """
    record = row.arms["cache"].record
    agrees = {
        None: "",
        True: ", the answer of full computation",
        False: ", another answer than full computation",
    }
    return (
        f"{record.provenance}, {record.computed_tokens} of {record.prompt_tokens} tokens computed"
        f"{from_donors(row.arms['cache'].donors)}{agrees[row.agrees('cache')]}"
    )


def from_donors(names: Sequence[str]) -> str:
    """Return `, from 6 donors (rag-3, rag-7)`; empty without donors."""
    if not names:
        return ""
    return f", from {count_noun(len(names), 'donor')} ({', '.join(dict.fromkeys(names))})"


def decision_sentences(explanation: SampleExplanation) -> list[str]:
    """Say which plan ran, why no more was reused, what was considered, and what the run noted."""
    decision, donor_search = explanation.decision, explanation.decision.donor_search
    lines = [
        f"plan: {explanation.method}, {explanation.computed} of {decision.tokens} tokens"
        f" computed{from_donors(explanation.donors)}"
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
        f"exact prefix: {prefix_text}; copied text: {copied} tokens in"
        f" {count_noun(len(donor_search.runs), 'run')}"
    )

    if explanation.recorded:
        lines.append(f"the run noted: {explanation.recorded}")
    return lines


def to_terminal(explanation: SampleExplanation, console: Console) -> None:
    """Print an explanation as a table and sentences."""
    print_blocks(explanation_blocks(explanation), console)


def to_html(explanation: SampleExplanation) -> str:
    """Return the explanation as one self-contained page."""
    about = {
        "model": explanation.settings.model,
        "data set": explanation.settings.dataset,
        "earlier samples": explanation.earlier,
    }
    blocks = [
        drawn(explanation_blocks(explanation)),
        facts(about),
        command(run_command_of(explanation.settings.named())),
    ]
    title = (
        f"Why {explanation.sample} was a"
        f" {'miss' if explanation.method in ('none', 'prefix') else 'hit'}"
    )
    return page(title, [ReportSection("", blocks)])


def explanation_blocks(explanation: SampleExplanation) -> list[Block]:
    """Return the question, the candidates and the decision."""
    rows = [
        [
            candidate.level,
            f"{candidate.score:.3f}",
            "yes" if candidate.trusted else "no",
            f"{candidate.sample}: {short(candidate.chunk, 200)}",
            "\n".join(candidate.verdicts),
        ]
        for candidate in explanation.candidates
    ]

    title = f"nearest of {explanation.earlier} earlier samples, by level"
    candidates = TextTable(title, ("level", "score", "trusted", "sample", "guards"), rows)
    return [
        f"{explanation.sample}: {short(explanation.question, 600)}",
        candidates,
        *decision_sentences(explanation),
    ]

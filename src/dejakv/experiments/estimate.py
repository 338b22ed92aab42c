"""Estimates from a log of prompts whether reuse pays, and the dry run of `dejakv run`.

An estimate tells what occurred before, what each setting would hit, how often it would be wrong,
and what is recommended (`advice`). Nothing is answered, except by the model of `label_with`.

A dry run looks every sample up as a live run does. A would-be hit is judged by the data set's
answers: it is false if the donor's question has another right answer. Blends, and other plans from
pieces of donors, are not judged, since they do not give the donor's answer.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from dejakv import __version__
from dejakv.build import build_cache, build_guards
from dejakv.cache import HierarchicalCache, check_method
from dejakv.config import SemanticCacheConfig
from dejakv.datasets.base import Sample
from dejakv.datasets.entries import LIMITS, OTHER, Entry
from dejakv.datasets.log import RequestLog
from dejakv.datasets.registry import KNOWN, take_first, unread_note
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.levels.base import Level
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import Decision
from dejakv.engines.base import NO_STATE, Completion, Prepared
from dejakv.engines.open import open_templates
from dejakv.errors import ConfigError, DatasetError, InputError
from dejakv.experiments.compare import check_ran, engine_context
from dejakv.experiments.reports.advice import recommend, trial_settings
from dejakv.experiments.rule_gains import RuleGains
from dejakv.experiments.samples import SamplePrompter, model_is_missing, read_samples
from dejakv.experiments.savings import SavingsCounter
from dejakv.experiments.settings import RunSettings, run_command_of
from dejakv.experiments.shares import TokenShares, tokenize_samples, tokens_of_samples
from dejakv.experiments.summary import RunProgress, by_count, same_answer, wilson
from dejakv.models import RECIPES
from dejakv.pipeline import Pipeline
from dejakv.request import Sampling
from dejakv.settings import display
from dejakv.store.open import open_store
from dejakv.vectors.base import TextEncoder
from dejakv.vectors.text import text_encoder

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
_EPOCH = "estimate"
SAMPLE = "sample"
"""Name of the log that comes with the package."""


@dataclass(frozen=True)
class EstimatedPrompt:
    """Prompt as tokens, and its right answer if it is known."""

    prepared: Prepared
    answer: str | None


def estimate(
    log: str | Path,
    model: str,
    *,
    max_false_hits: float = 0.01,
    label_with: str | None = None,
    index_encoder: str = "model",
    chunk_source: str = "question",
    raw_prompts: bool = False,
    max_samples: int = 2000,
    min_gain: int = SemanticCacheConfig.min_gain,
    timed: bool = False,
    watch: RunProgress | None = None,
    reading: "ReadRequests | None" = None,
) -> dict[str, Any]:
    """Return the figures of `estimate.json`.

    They are what occurred before and what that saves (`SavingsCounter.figures`), what rules of
    `dejakv stabilize` would add (`stabilize`; empty if nothing, or on a cluster), a row for each
    setting that answers prompts as their donors (`tally`), and `recommended` of these
    (`advice.recommend`).

    Parameters
    ----------
    log : str or Path
        File of requests (`datasets.log`), the name of a data set, or `sample`: a log that comes
        with the package.
    model : str
        Model whose tokenizer reads the prompts and, with `index_encoder="model"`, whose embeddings
        compare them.
    max_false_hits : float
        Largest share of false hits that a recommended setting may have, in (0, 1].
    label_with : str, optional
        Model whose answers are taken as right, instead of those in the log.
    index_encoder : str
        Encoder of texts for similar prompts. `model` takes the model's own embeddings, if the log
        has right answers to judge hits by and the model is fetched.
    chunk_source : str
        Text of a sample that is compared (`samples.chunk_of`).
    raw_prompts : bool
        Whether `prompt` is read as it stands, without the model's chat template.
    max_samples : int
        Most requests that are read.
    min_gain : int
        Fewest tokens that a reuse must save.
    timed : bool
        Whether to load the model, and tell seconds on this machine and bytes of state.
    watch : RunProgress, optional
        Observer of stages and requests.
    reading : callable, optional
        Reads and counts the requests; `RequestStream`, in this process, by default.

    Raises
    ------
    ConfigError
        For a share outside (0, 1], and for a chunk source that a request lacks.
    DatasetError
        For a log that cannot be read or has no prompts.
    InputError
        For a prompt that is empty or has pictures.
    MissingExtraError
        For an encoder whose package is not installed.
    ModelError
        For a model, tokenizer or encoder that cannot be loaded.
    """
    if not 0 < max_false_hits <= 1:
        raise ConfigError(
            f"--max-false-hits {display(max_false_hits)}: give a share above 0, up to 1 (0.01 is"
            " one in a hundred)"
        )

    watch = watch or RunProgress()
    if str(log) == SAMPLE and not Path(log).exists():
        log = str(files("dejakv.datasets").joinpath(f"{SAMPLE}.jsonl"))

    # A file that is called like a data set is the file.
    named = str(log) in KNOWN and not Path(log).exists()
    data: dict[str, Any] = (
        {"dataset": str(log)} if named else {"dataset": "log", "dataset_path": str(log)}
    )
    settings = RunSettings(
        model=model,
        chunk_source=chunk_source,
        raw_prompts=raw_prompts,
        max_samples=max_samples,
        **data,
    )
    file = None if named else RequestLog(Path(log))
    watch.stage("reading")
    request_stream = (reading or RequestStream)(file, settings, label_with, watch)
    if not request_stream.count:
        raise DatasetError(f"the log {Path(log).name!r} has no prompts: {_without_prompts(file)}")

    notes = unread_note(settings.dataset_path, request_stream.count, request_stream.more)
    if file is not None:
        notes += file.left_out
        if file.formats.keys() - {"Mooncake trace", "Azure trace"}:
            notes.append(
                "assumed: all state is kept; which answers a blend changes only a run shows"
            )
        notes += [LIMITS[name] for name in file.formats if name in LIMITS]

    common: dict[str, Any] = {"index_encoder": index_encoder, "min_gain": min_gain}

    # Without right answers no hit can be judged, and the model need not be loaded for it.
    needs_embeddings = index_encoder == "model" and bool(request_stream.labelled)
    if needs_embeddings and not timed and model_is_missing(settings):
        notes.append(
            "similar texts were not compared, for that the model must be here:"
            f" {RECIPES[model].command}"
        )
        needs_embeddings = False

    costs, encoder = None, text_encoder(index_encoder) if index_encoder != "model" else None
    engine: Any
    with engine_context(settings) if needs_embeddings or timed else nullcontext() as engine:
        if timed:
            costs = engine.costs()
        if needs_embeddings:
            encoder = text_encoder("model", embed=engine.embed_text, fingerprint=_EPOCH)
        tries = list(settings_to_try(min_gain, encoder is not None)) if request_stream.texts else []
        watch.stage("asking the levels")
        rows = [
            _row(*setting_counts)
            for setting_counts in zip(
                tries, request_stream.tallies(tries, encoder, watch), strict=True
            )
        ]

    advice = recommend(rows, max_false_hits)
    figures = request_stream.savings.figures(costs)

    # Later settings win: a trial's blend replaces the reuse of the advice.
    proof = SemanticCacheConfig.from_dict(
        {"semantic_text": False, **common, **advice["settings"], **trial_settings(figures)}
    )
    return {
        "kind": "estimate",
        "log": Path(log).name,
        "samples": request_stream.count,
        "formats": dict(file.formats) if file is not None else {},
        "broken": file.unread if file is not None else 0,
        "labelled": request_stream.labelled,
        "labels": label_with or "the log's answers",
        "model": model,
        "index_encoder": index_encoder,
        "max_false_hits": max_false_hits,
        "min_gain": min_gain,
        **figures,
        "stabilize": list(request_stream.rule_gains),
        "rows": rows,
        "recommended": advice,
        "command": (
            run_command_of(replace(settings, cache=proof).named()) if request_stream.texts else ""
        ),
        "notes": notes,
        "dejakv_version": __version__,
    }


def _without_prompts(file: RequestLog | None) -> str:
    """Say why a log has no prompts, and what to give instead."""
    if file is None or not (file.unread or file.skipped):
        return "give a file with one request a line"
    reasons = [
        f"line {place}: {why}" for place, why in list(file.broken.items())[:1]
    ] or file.left_out
    if OTHER in file.skipped:
        reasons.append(LIMITS["vLLM's log"])
    return "; ".join(reasons)


class RequestStream:
    """Requests of a log or a data set, in the order of their arrival.

    That is the order of the file where any request has no time. The constructor reads and counts
    all requests; its errors are those of `estimate`.

    Attributes
    ----------
    count : int
        All requests.
    texts : int
        Requests with text.
    labelled : int
        Requests with text and a right answer.
    more : bool
        Whether further requests were left out.
    savings : SavingsCounter
        What their tokens would save.
    rule_gains : list[dict]
        What each rule of `dejakv stabilize` would add to prefixes (`RuleGains.figures`).
    """

    rule_gains: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        file: RequestLog | None,
        settings: RunSettings,
        label_with: str | None,
        watch: RunProgress,
    ) -> None:
        if file is not None:
            entry_source = file.entries()
        else:
            entry_source = (
                Entry(n, "JSON lines", sample)
                for n, sample in enumerate(read_samples(settings, beyond=1), 1)
            )

        entries, self.more = take_first(entry_source, settings.max_samples)

        # Where only some have a time there is no order but the file's own.
        if all(entry.time is not None for entry in entries):
            entries = tuple(sorted(entries, key=lambda entry: entry.time or 0.0))
        samples: Sequence[Sample] = [entry.sample for entry in entries if entry.sample is not None]
        if label_with is not None and samples:
            samples = labelled_by(label_with, samples, watch, raw_prompts=settings.raw_prompts)

        prepared = estimated_prompts(samples, settings)
        self.count, self.savings, self._prompts = (
            len(entries),
            SavingsCounter(),
            list[EstimatedPrompt](),
        )
        rule_gains = RuleGains(tokens_of_samples(settings)) if samples else None
        for number, entry in enumerate(entries, 1):
            if entry.sample is None:
                self.savings.add_trace(entry)
            else:
                # One for each entry with a text, made lazily: both iterate in the same order.
                self._prompts.append(next(prepared))
                ids = self._prompts[-1].prepared.token_ids
                self.savings.add(ids, entry)
                if rule_gains is not None:
                    rule_gains.add(entry.sample, ids, entry.tenant)
            watch.sample(number, len(entries), None)

        self.rule_gains = rule_gains.figures() if rule_gains is not None else ()
        self.texts = len(self._prompts)
        self.labelled = sum(prompt.answer is not None for prompt in self._prompts)

    def tallies(
        self, tries: Sequence[SemanticCacheConfig], encoder: TextEncoder | None, watch: RunProgress
    ) -> list[Counter[str]]:
        """Return the counts of each setting to try (`tally`).

        Similar texts are compared only if there is an encoder.
        """
        encoder = memoized_encoder(encoder) if encoder is not None else None
        counts_by_setting: list[Counter[str]] = []
        for config in tries:
            counts_by_setting.append(tally(self._prompts, config, encoder))
            watch.sample(len(counts_by_setting), len(tries), None)
        return counts_by_setting


ReadRequests = Callable[[RequestLog | None, RunSettings, str | None, RunProgress], RequestStream]
"""Function that reads and counts a log's requests."""


def estimated_prompts(
    samples: Iterable[Sample], settings: RunSettings
) -> Iterator[EstimatedPrompt]:
    """Yield the samples as tokens; the errors are those of `tokenize_samples`."""
    for sample, prepared in tokenize_samples(samples, settings):
        yield EstimatedPrompt(replace(prepared, epoch=_EPOCH), sample.answer)


def labelled_by(
    model: str, samples: Sequence[Sample], watch: RunProgress, *, raw_prompts: bool = False
) -> list[Sample]:
    """Return the samples with a model's greedy answers, computed in full, as their right ones.

    The answer is None where the model cannot read the prompt.

    Raises
    ------
    InputError
        For an empty question.
    ModelError
        For a model that cannot be loaded.
    """
    settings = RunSettings(model=model)
    watch.stage(f"loading {model}")
    with engine_context(settings) as engine:
        prompter = SamplePrompter(open_templates(settings), raw=raw_prompts)
        pipeline = Pipeline(engine)
        sampling = Sampling()
        answers: dict[str, str | None] = {}
        labelled: list[Sample] = []
        watch.stage(f"{model} answers the prompts")
        for number, sample in enumerate(samples, 1):
            request: Any = prompter.request(sample, sampling)
            # Greedy answers repeat, so each distinct prompt is computed once.
            if request.prompt not in answers:
                try:
                    answers[request.prompt] = pipeline.answer(request).text
                except InputError:
                    # The prompt is too long for this model.
                    answers[request.prompt] = None
            labelled.append(replace(sample, answer=answers[request.prompt]))
            watch.sample(number, len(samples), None)

    return labelled


def memoized_encoder(encoder: TextEncoder) -> TextEncoder:
    """Wrap an encoder to encode each text once."""
    return text_encoder(
        "model", embed=functools.cache(encoder.encode), fingerprint=encoder.fingerprint
    )


def settings_to_try(min_gain: int, similar: bool = True) -> Iterator[SemanticCacheConfig]:
    """Yield the settings that an estimate compares.

    They are exact reuse, equal text, then with `similar` each threshold with and without the
    lexical guard.
    """
    plain = SemanticCacheConfig(reuse="exact", semantic_text=False, min_gain=min_gain)
    # Equal text alone, so that what similar text adds can be told apart.
    adopting = replace(plain, reuse="adopt")
    yield from (plain, adopting)
    for threshold in THRESHOLDS if similar else ():
        for guard in (True, False):
            yield replace(
                adopting, semantic_text=True, similarity_threshold=threshold, lexical_guard=guard
            )


def tally(
    prompts: Sequence[EstimatedPrompt],
    config: SemanticCacheConfig,
    encoder: TextEncoder | None = None,
) -> Counter[str]:
    """Count what a setting does over the whole log, in its order.

    Similar texts are compared only with an encoder. The counts of partitions may be added up.

    Returns
    -------
    Counter[str]
        `asked`: requests; `exact`: those that are equal to an earlier one, which are always right;
        `hits`: approximate ones; `judged`: hits whose right answer and donor's answer are known;
        `wrong`: judged hits whose right answer is not the donor's; `tokens_saved`: of exact
        prefixes and exact requests too.
    """
    levels: list[Level] = [ExactTextCache()]
    if encoder is not None and config.semantic_text:
        levels.append(SemanticTextCache(encoder, config.similarity_threshold))
    with closing(
        HierarchicalCache(
            open_store(), levels, build_guards(config, levels), config, background=False
        )
    ) as cache:
        lookups, counts = LookUps(cache), Counter(asked=len(prompts))
        for prompt in prompts:
            decision, right = lookups.look_up(prompt.prepared, prompt.answer)
            adopted = decision.plan.method == "adopt"
            counts["exact"] += decision.plan.method == "exact"
            counts["hits"] += adopted
            counts["judged"] += adopted and right is not None
            counts["wrong"] += adopted and right is False
            counts["tokens_saved"] += decision.plan.reused

    return counts


def _row(config: SemanticCacheConfig, counts: Counter[str]) -> dict[str, Any]:
    level = (
        "exact"
        if config.reuse == "exact"
        else "semantic_text"
        if config.semantic_text
        else "exact_text"
    )
    return {
        "level": level,
        "threshold": config.similarity_threshold if config.semantic_text else None,
        "lexical_guard": config.lexical_guard,
        "exact": counts["exact"],
        "hits": counts["hits"],
        "hit_rate": counts["hits"] / counts["asked"],
        "hit_interval": wilson(counts["hits"], counts["asked"]),
        **_judged(counts["judged"], counts["wrong"]),
        "tokens_saved": counts["tokens_saved"],
    }


class LookUps:
    """Lookups of prompts, one after the other in a cache, as in a live run; none is computed."""

    def __init__(self, cache: HierarchicalCache) -> None:
        self._cache = cache
        self._answers: dict[str, str | None] = {}

    def look_up(
        self, prepared: Prepared, answer: str | None, costs: ReuseCosts | None = None
    ) -> tuple[Decision, bool | None]:
        """Look a prompt up, and make it a donor for the next ones.

        Returns
        -------
        tuple of Decision and bool or None
            The decision, and whether the donor's question has the same right answer. That is None
            if one of the two answers is unknown, or the plan does not give the donor's answer.
        """
        decision = self._cache.find(prepared, costs=costs)
        plan, right = decision.plan, None
        # A piecewise plan has pieces of several donors, so that no one donor's answer is given.
        if plan.method not in ("none", "prefix") and not plan.piecewise:
            donor_answer = self._answers.get(plan.donors[0].id)
            right = (
                same_answer(donor_answer, answer)
                if donor_answer is not None and answer is not None
                else None
            )

        # Nothing is computed: an empty state makes the prompt a donor by its text.
        done = Completion(answer or "", (), len(prepared.token_ids), 0, capture=lambda: NO_STATE)
        self._cache.keep(prepared, decision, plan, done)

        # The first answer stays: a repeated prompt does not become another donor.
        self._answers.setdefault(decision.key, answer)
        return decision, right


def _judged(judged: int, wrong: int) -> dict[str, Any]:
    """Return how many hits were judged, and how many of these were false."""
    return {
        "judged": judged,
        "false_hits": wrong if judged else None,
        "false_hit_rate": wrong / judged if judged else None,
        "false_hit_interval": wilson(wrong, judged) if judged else None,
    }


def _marked(marks: Sequence[bool | None]) -> dict[str, Any]:
    return _judged(sum(mark is not None for mark in marks), sum(mark is False for mark in marks))


def dry_run(
    settings: RunSettings,
    chosen: Sequence[Sample],
    engine: Any,
    prompter: SamplePrompter,
    watch: RunProgress,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Look every sample up, and return the summary and one line for each sample.

    Of the model the tokenizer, the embedding table and the vision tower are used, and nothing else.

    Raises
    ------
    InputError
        If none of the samples could run.
    ModelError
        For a method of reuse that the engine or the model does not support.
    """
    # Without a bound, as nothing runs from which its gate could learn.
    config = replace(settings.cache, error_bound=None)
    check_method(engine, config)
    # A store in memory is enough, since no state is stored.
    cache = build_cache(config, engine, store=open_store(), background=False)
    lookups, shares = LookUps(cache), TokenShares()
    lines: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    watch.stage(f"{settings.dataset}, dry run")

    for number, sample in enumerate(chosen, start=1):
        line: dict[str, Any] = {
            "id": sample.id,
            "question": sample.question,
            "answer": sample.answer,
        }
        try:
            prepared = engine.prepare(prompter.request(sample))
        except InputError as error:
            not_run[sample.id] = line["error"] = str(error)
        else:
            shares.add(prepared.token_ids, prepared.request.partition, prepared.spans)
            prepared = replace(prepared, epoch=engine.epoch)
            costs = cache.costs(engine, timed=False)
            line |= _line(*lookups.look_up(prepared, sample.answer, costs))
        lines.append(line)
        watch.sample(number, len(chosen), None)

    cache.close()
    check_ran(not_run, len(chosen))
    summary = _summary(settings, [line for line in lines if "error" not in line])
    return {**summary, "not_run": not_run, **shares.figures}, lines


def _line(decision: Decision, right: bool | None) -> dict[str, Any]:
    """Return the log line of a dry run; `right` tells whether the donor's answer is right."""
    # A prefix has no match.
    plan, match = decision.plan, decision.plan.match
    donor = plan.donors[0] if match else None
    return {
        "provenance": plan.provenance,
        "level": match.level if match else "",
        "score": match.score if match else None,
        "donor": donor.chunk if donor else None,
        "donor_answer": donor.answer if donor else None,
        "right": right,
        "reason": plan.reason,
        "plan": plan.name,
        "plans": str(decision),
        "statuses": dict(decision.statuses),
        "lookup_ms": 1e3 * decision.seconds,
    }


def _summary(settings: RunSettings, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    marks: dict[str, list[bool | None]] = {}
    for line in lines:
        if line["level"]:
            marks.setdefault(line["level"], []).append(line["right"])

    hits = [mark for level in marks.values() for mark in level]
    return {
        "cache_mode": "dry-run",
        "model": settings.model,
        "dataset": settings.dataset,
        "media": settings.cache.media,
        "samples": len(lines),
        "hit_rate": len(hits) / len(lines),
        "hit_rate_interval": wilson(len(hits), len(lines)),
        **_marked(hits),
        "by_level": {
            level: {"hits": len(level_marks), **_marked(level_marks)}
            for level, level_marks in sorted(marks.items())
        },
        "not_used": by_count(line["reason"] for line in lines if line["reason"]),
        "plans": by_count(line["plan"] for line in lines),
        "lookup_ms": {"mean": sum(line["lookup_ms"] for line in lines) / len(lines)},
        "dejakv_version": __version__,
    }

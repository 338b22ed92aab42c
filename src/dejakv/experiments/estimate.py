"""Does reuse pay for a log of prompts? What occurred before, what each setting would hit and how often it would be wrong, what is
recommended (`advice`), and a dry run of it. Nothing is answered, except by the model of `label_with`.

A dry run looks every sample up as a live run does. A would-be hit is judged by the data set's answers: it is false if the donor's
question has another right answer. (Not for blend and top_layer, which do not give the donor's answer.)
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dejakv import __version__
from dejakv.build import build_cache, build_guards
from dejakv.cache import HierarchicalCache, check_top_layer
from dejakv.config import SIMILARITY_THRESHOLD, SemanticCacheConfig
from dejakv.datasets.base import Sample
from dejakv.datasets.registry import KNOWN, begin, told
from dejakv.decide.levels.base import Level
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import APPROXIMATE
from dejakv.engines.base import NO_STATE, Completion, Prepared
from dejakv.engines.open import open_templates
from dejakv.errors import ConfigError, DatasetError, InputError
from dejakv.experiments.advice import command_of, labels_for, recommend
from dejakv.experiments.compare import check_ran, opened
from dejakv.experiments.data import model_is_missing, read_samples, tokenizer_of
from dejakv.experiments.prompting import Prompter
from dejakv.experiments.scoring import same, wilson
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.shares import Share, Shares
from dejakv.experiments.summary import Progress, counted
from dejakv.models import RECIPES
from dejakv.part_order import SeenPrompts, arranged
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.settings import shown
from dejakv.store.open import open_store
from dejakv.vectors.base import Vector
from dejakv.vectors.text import text_encoder

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
_EPOCH = "estimate"


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
    cache: Mapping[str, Any] | None = None,
    watch: Progress | None = None,
) -> dict[str, Any]:
    """The figures of `estimate.json`: the shares, a row a setting (see `measure`), `recommended` (see `advice.recommend`), and `dry_run`
    (see `dry_run`), None where the model is not here.

    log            file of prompts (JSON lines), or the name of a data set
    model          whose tokenizer reads the prompts and, with `index_encoder="model"`, whose embeddings compare them
    label_with     model whose answers are taken as right, instead of those in the log
    raw_prompts    `prompt` is read as it stands, without the model's chat template
    cache          settings of the dry run; None: the recommended ones

    Raises: DatasetError, ConfigError, InputError, ModelError, each naming what to change.
    """
    if not 0 < max_false_hits <= 1:
        raise ConfigError(
            f"--max-false-hits {shown(max_false_hits)}: give a share above 0, up to 1 (0.01 is one in a hundred)"
        )
    watch = watch or Progress()
    named = str(log) in KNOWN and not Path(log).exists()
    data: dict[str, Any] = {"dataset": str(log)} if named else {"dataset": "jsonl", "dataset_path": str(log)}
    settings = RunSettings(
        model=model,
        chunk_source=chunk_source,
        raw_prompts=raw_prompts,
        max_samples=max_samples,
        cache_mode="shares",
        **data,
    )
    found: Sequence[Sample]
    found, more = begin(read_samples(settings, beyond=1), max_samples)
    if not found:
        raise DatasetError(f"the log {Path(log).name!r} has no prompts: give a file with one request a line")
    pictured = next((sample for sample in found if sample.media), None)
    if pictured is not None:
        raise InputError(
            f"sample {pictured.id} has pictures, and estimate reads texts only: give dejakv run --cache-mode dry-run"
        )
    if label_with is not None:
        found = labelled_by(label_with, found, watch, raw_prompts=raw_prompts)
    asked, shares = _asked(found, settings)
    notes = told(settings.dataset_path, len(found), more)
    rows: list[dict[str, Any]] = []
    looked_up: dict[str, Any] | None = None

    def ask(encoder: Any) -> dict[str, Any]:
        watch.stage("asking the levels")
        tries = list(settings_to_try(encoder, min_gain))
        for number, setting in enumerate(tries, 1):
            rows.append(measure(asked, setting, encoder))
            watch.sample(number, len(tries), None)
        return recommend(rows, max_false_hits)

    if index_encoder == "model" and not model_is_missing(settings):
        watch.stage(f"loading {model}")
        with opened(settings) as engine:
            encoder = Remembering(text_encoder("model", embed=engine.embed_text, fingerprint=_EPOCH))
            encoder.encode_many([one.prepared.request.chunk for one in asked])
            advice = ask(encoder)
            config = SemanticCacheConfig.from_dict(
                {"index_encoder": "model", "min_gain": min_gain, **(cache or advice["settings"])}
            )
            prompter = Prompter(open_templates(settings), None, chunk_source, raw=raw_prompts)
            looked_up, _ = dry_run(replace(settings, cache=config), found, engine, prompter, watch)
    elif index_encoder == "model":
        notes.append(f"similar texts were not compared, for that the model must be here: {RECIPES[model].command}")
        advice = ask(None)
    else:
        advice = ask(Remembering(text_encoder(index_encoder)))
    total = shares.total
    return {
        "kind": "estimate",
        "log": Path(log).name,
        "samples": len(asked),
        "labelled": sum(one.answer is not None for one in asked),
        "labels": label_with or "the log's answers",
        "model": model,
        "index_encoder": index_encoder,
        "max_false_hits": max_false_hits,
        "min_gain": min_gain,
        "prompt_tokens": total.tokens,
        "tokens_prefix": total.prefix,
        "tokens_anywhere": total.anywhere,
        **share_figures(total, shares.complete),
        "rows": rows,
        "recommended": advice,
        "bound": labels_for(rows, len(asked), max_false_hits),
        "command": command_of(settings, index_encoder, {**advice["settings"], "min_gain": min_gain}),
        "dry_run": looked_up,
        "notes": notes,
        "dejakv_version": __version__,
    }


def _asked(found: Sequence[Sample], settings: RunSettings) -> tuple[list["Asked"], Shares]:
    tokenizer: Any = tokenizer_of(settings)
    prompter = Prompter(tokenizer, None, settings.chunk_source, raw=settings.raw_prompts)
    shares = Shares()
    asked: list[Asked] = []
    for sample in found:
        request = prompter.request(sample)
        ids = tuple(tokenizer(request.prompt, add_special_tokens=False)["input_ids"])
        shares.add(ids, request.partition)
        asked.append(Asked(Prepared(request, ids, epoch=_EPOCH), sample.answer))
    return asked, shares


def labelled_by(
    model: str, samples: Sequence[Sample], watch: Progress, *, max_new_tokens: int = 16, raw_prompts: bool = False
) -> list[Sample]:
    """The samples with the model's greedy answers, computed in full, as their right ones; None where it cannot read the prompt.

    Raises: ModelError for a model that cannot be loaded.
    """
    settings = RunSettings(model=model)
    watch.stage(f"loading {model}")
    with opened(settings) as engine:
        prompter = Prompter(open_templates(settings), raw=raw_prompts)
        pipeline = Pipeline(engine)
        sampling = Sampling(max_new_tokens)
        known: dict[str, str | None] = {}
        labelled: list[Sample] = []
        watch.stage(f"{model} answers the prompts")
        for number, sample in enumerate(samples, 1):
            request: Any = prompter.request(sample, sampling)
            if request.prompt not in known:
                try:
                    known[request.prompt] = pipeline.answer(request).text
                except InputError:  # too long for this model
                    known[request.prompt] = None
            labelled.append(replace(sample, answer=known[request.prompt]))
            watch.sample(number, len(samples), None)
    return labelled


@dataclass(frozen=True)
class Asked:
    """A prompt as tokens, and its right answer if it is known."""

    prepared: Prepared
    answer: str | None


@dataclass(frozen=True)
class Setting:
    """One setting of the levels.

    level      `exact`: equal prompts and exact prefixes; `exact_text`: equal text as well; `semantic_text`: similar text as well
    threshold  least cosine of similar text
    """

    level: Literal["exact", "exact_text", "semantic_text"] = "exact"
    threshold: float | None = None
    lexical_guard: bool = True
    min_gain: int = SemanticCacheConfig.min_gain

    @property
    def config(self) -> SemanticCacheConfig:
        return SemanticCacheConfig(
            reuse="exact" if self.level == "exact" else "adopt",
            semantic_text=self.threshold is not None,
            similarity_threshold=SIMILARITY_THRESHOLD if self.threshold is None else self.threshold,
            lexical_guard=self.lexical_guard,
            min_gain=self.min_gain,
        )


class Remembering:
    """An encoder that encodes each text once."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._known: dict[str, Vector] = {}
        self.fingerprint: str = encoder.fingerprint

    @property
    def dim(self) -> int:
        return int(self._encoder.dim)

    def encode(self, text: str) -> Vector:
        if text not in self._known:
            self._known[text] = self._encoder.encode(text)
        return self._known[text]

    def encode_many(self, texts: Sequence[str]) -> list[Vector]:
        return [self.encode(text) for text in texts]


def settings_to_try(encoder: object | None, min_gain: int) -> Iterator[Setting]:
    """Exact reuse, equal text, then each threshold with and without the lexical guard; these only with an encoder."""
    yield Setting("exact", min_gain=min_gain)
    yield Setting("exact_text", min_gain=min_gain)
    for threshold in THRESHOLDS if encoder is not None else ():
        yield Setting("semantic_text", threshold, min_gain=min_gain)
        yield Setting("semantic_text", threshold, lexical_guard=False, min_gain=min_gain)


def measure(asked: Sequence[Asked], setting: Setting, encoder: Any = None) -> dict[str, Any]:
    """One row: the hits of a setting over the whole log, in its order, and how many were false.

    `exact` requests are equal to an earlier one and always right. `hits` are the approximate ones; of the `judged`, whose
    right answer and donor's answer are known, `false_hits` have another answer than their donor. `tokens_saved` counts exact
    prefixes and exact requests too. `not_worth` had a trusted donor, but would have saved less than `min_gain`.
    """
    config = setting.config
    levels: list[Level] = [ExactTextCache()]
    if setting.threshold is not None:
        levels.append(SemanticTextCache(encoder, setting.threshold))
    answers: dict[str, str | None] = {}
    cache = HierarchicalCache(open_store(), levels, build_guards(config, levels), config, background=False)
    exact = hits = judged = wrong = saved = not_worth = 0
    for one in asked:
        decision = cache.find(one.prepared)
        plan = decision.plan
        saved += plan.reused
        exact += plan.method == "exact"
        not_worth += plan.reason.startswith("min_gain")
        if plan.method == "adopt":
            hits += 1
            right = answers[plan.donors[0].id]
            if right is not None and one.answer is not None:
                judged += 1
                wrong += not same(right, one.answer)
        done = Completion(one.answer or "", (), len(one.prepared.token_ids), 0, capture=lambda: NO_STATE)
        cache.keep(one.prepared, decision, plan, done)
        answers.setdefault(decision.key, one.answer)
    cache.close()
    return {
        "level": setting.level,
        "threshold": setting.threshold,
        "lexical_guard": setting.lexical_guard,
        "exact": exact,
        "hits": hits,
        "hit_rate": hits / len(asked),
        "hit_interval": wilson(hits, len(asked)),
        "judged": judged,
        "false_hits": wrong if judged else None,
        "false_hit_rate": wrong / judged if judged else None,
        "false_hit_interval": wilson(wrong, judged) if judged else None,
        "tokens_saved": saved,
        "not_worth": not_worth,
    }


def dry_run(
    settings: RunSettings, chosen: Sequence[Sample], engine: Any, prompter: Prompter, watch: Progress
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and one line a sample. Only the tokenizer, the embedding table and the tower are used."""
    config = replace(settings.cache, error_bound=None)  # nothing runs from which a gate could learn
    check_top_layer(engine, config)
    cache = build_cache(config, engine, store=open_store(), background=False)  # it stores no state
    shares = Shares()
    lines: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    watch.stage(f"{settings.dataset}, dry run")
    for number, sample in enumerate(chosen, start=1):
        try:
            prepared = engine.prepare(prompter.request(sample))
        except InputError as error:
            not_run[sample.id] = str(error)
            lines.append({"id": sample.id, "question": sample.question, "answer": sample.answer, "error": str(error)})
            watch.sample(number, len(chosen), None)
            continue
        shares.add(prepared.token_ids, prepared.request.partition, prepared.spans)
        prepared = replace(prepared, epoch=engine.epoch)
        decision = cache.find(prepared, costs=engine.costs_under(settings.cache.costs, timed=False))
        planned = decision.plan
        hit = planned.method in ("exact", *APPROXIMATE)
        donor = planned.donors[0] if hit else None
        right = None
        if donor is not None and not planned.piecewise and sample.answer is not None and donor.answer is not None:
            right = same(donor.answer, sample.answer)
        lines.append(
            {
                "id": sample.id,
                "question": sample.question,
                "answer": sample.answer,
                "provenance": f"hit ({planned.match.provenance})" if hit and planned.match else "miss",
                "level": planned.match.level if hit and planned.match else "",
                "score": planned.match.score if planned.match else None,
                "donor": donor.chunk if donor else None,
                "donor_answer": donor.answer if donor else None,
                "right": right,
                "reason": planned.reason,
                "plan": planned.name,
                "plans": str(decision),
                "statuses": dict(decision.statuses),
                "lookup_ms": 1e3 * decision.seconds,
            }
        )
        cache.keep(prepared, decision, planned, _not_run(sample, len(prepared.token_ids)))
        watch.sample(number, len(chosen), None)
    cache.close()
    check_ran(not_run, len(chosen))
    summary = _summary(settings, [line for line in lines if "error" not in line])
    return {**summary, "not_run": not_run, **share_figures(shares.total, shares.complete)}, lines


def _not_run(sample: Sample, tokens: int) -> Completion:
    """A placeholder for the answer: the data set's own."""
    return Completion(sample.answer or "", (), tokens, 0, capture=lambda: NO_STATE)


def _summary(settings: RunSettings, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    hits = [line for line in lines if line["level"]]
    levels = sorted({line["level"] for line in hits})
    return {
        "cache_mode": "dry-run",
        "model": settings.model,
        "dataset": settings.dataset,
        "media": settings.cache.media,
        "samples": len(lines),
        "hit_rate": len(hits) / len(lines),
        "hit_rate_interval": wilson(len(hits), len(lines)),
        **_false_hits(hits),
        "by_level": {
            level: {"hits": sum(line["level"] == level for line in hits)}
            | _false_hits([line for line in hits if line["level"] == level])
            for level in levels
        },
        "not_used": counted(line["reason"] for line in lines if line["reason"]),
        "plans": dict(Counter(line["plan"] for line in lines).most_common()),
        "lookup_ms": {"mean": sum(line["lookup_ms"] for line in lines) / len(lines)},
        "dejakv_version": __version__,
    }


def _false_hits(hits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    judged = [line["right"] for line in hits if line["right"] is not None]
    wrong = len(judged) - sum(judged)
    return {
        "judged": len(judged),
        "false_hits": wrong if judged else None,
        "false_hit_rate": wrong / len(judged) if judged else None,
        "false_hit_interval": wilson(wrong, len(judged)) if judged else None,
    }


def share_figures(total: Share, complete: bool = True) -> dict[str, Any]:
    """`share_prefix` and `share_anywhere` for a summary, [0, 1]; `shares_complete` if a table became full."""
    figures: dict[str, Any] = {"share_prefix": total.share_prefix, "share_anywhere": total.share_anywhere}
    return figures if complete else {**figures, "shares_complete": False}


def measured(chosen: Sequence[Sample], prompter: Prompter, prepare: Callable[[Request], Prepared]) -> dict[str, Any]:
    """The shares of a run's prompts, in its order."""
    shares = Shares()
    for sample in chosen:
        prepared = prepare(prompter.request(sample))
        shares.add(prepared.token_ids, prepared.request.partition, prepared.spans)
    return share_figures(shares.total, shares.complete)


def shares_alone(
    settings: RunSettings, chosen: Sequence[Sample], watch: Progress
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and a line a sample of a run without a model: the shares, and no look-ups.

    Raises: InputError for samples with pictures, whose tokens depend on the model; ModelError for a missing tokenizer.
    """
    tokenizer = tokenizer_of(settings)
    prompter = Prompter(tokenizer, settings.prompt_template, settings.chunk_source, raw=settings.raw_prompts)
    shares, seen = Shares(), SeenPrompts()
    lines: list[dict[str, Any]] = []

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for number, sample in enumerate(chosen, 1):
        if sample.media:
            raise InputError(f"sample {sample.id} has pictures: name an image-text model with --model")
        request = prompter.request(sample)
        if request.order == "free":
            best = arranged(request.frame, seen, tokenize, request.partition)
            parts = tuple(request.parts[place] for place in best.order)
            request = replace(request, prompt=best.prompt, parts=parts)
        ids = tokenize(request.prompt)
        seen.add(ids, request.partition)
        found = shares.add(ids, request.partition)
        lines.append({"id": sample.id, "question": sample.question, "answer": sample.answer, **vars(found)})
        watch.sample(number, len(chosen), None)
    summary = {
        "cache_mode": settings.cache_mode,
        "model": settings.model,
        "dataset": settings.dataset,
        "samples": len(lines),
        "prompt_tokens": shares.total.tokens,
        **share_figures(shares.total, shares.complete),
        "dejakv_version": __version__,
    }
    if settings.cache_mode == "dry-run":
        summary["warning"] = (
            f"the levels were not asked, for that the model must be here: {RECIPES[settings.model].command}"
        )
    return summary, lines

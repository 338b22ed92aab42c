"""`dejakv certify`: every would-be hit of a log both ways, with reuse and computed in full, and what that certifies."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dejakv import __version__
from dejakv.datasets.base import Sample
from dejakv.datasets.registry import KNOWN
from dejakv.decide.bound import certified_setting
from dejakv.decide.plan import COPIED, Decision, Observer
from dejakv.engines.open import open_templates
from dejakv.errors import ConfigError
from dejakv.experiments.compare import check_ran, close_all, opened, pipeline_for, serve_all
from dejakv.experiments.run import cache_folder, chosen_samples
from dejakv.experiments.samples import SamplePrompter
from dejakv.experiments.settings import RunSettings, settings_of
from dejakv.experiments.summary import ArmOutcome, RunProgress, SampleRow
from dejakv.request import Prepared, Request
from dejakv.trust.certificate import NO_BOUND, Certificate, CertificateAudit, CertifiedHit, rules_of
from dejakv.trust.differs import AnswerComparison, ComparedAnswer, differs_of
from dejakv.trust.features import features_of, risk_of

logger = logging.getLogger(__name__)

FIXED: dict[str, Any] = {
    "cache.reuse": "blend",
    "cache.semantic_text": False,
    "cache.embedding_layers": [],
    "cache.levels": [],
    "cache.error_bound": None,
    "cache.certificate": None,
}
"""Settings of every such run: it blends copied text alone, as vLLM's connector does."""

NOT_KEPT = (
    "output",
    "implied",
    "dataset_path",
    "cache.store",
    "cache.disk_dir",
    "cache.fusion_cache_dir",
    "cache.image_root",
)
"""Settings that a file of another machine has no use for."""


def data_of(log: str) -> dict[str, Any]:
    """Settings for a log: a file of one, or the name of a data set."""
    if log in KNOWN and not Path(log).is_file():
        return {"dataset": log}
    return {"dataset": "log", "dataset_path": log}


def certify(settings: RunSettings, watch: RunProgress | None = None, engine: Any = None) -> Certificate:
    """Run the log of the settings, and certify what the evidence opens under `settings.cache.error_bound`.

    Raises: ConfigError without a bound, DatasetError for a log without prompts, ModelError, InputError where nothing could run.
    """
    cache_config = settings.cache
    if cache_config.error_bound is None:
        raise ConfigError(NO_BOUND)

    epoch, hits, ran = _ran(_fixed(settings), watch or RunProgress(), engine)
    rules = rules_of(hits, cache_config)
    # The rules' counts join the log's; what is left of them are the certificate's fields.
    counts = {**ran, **rules.pop("counts")}
    return Certificate(
        error_bound=cache_config.error_bound,
        confidence=cache_config.confidence,
        differs=cache_config.differs,
        model=settings.model,
        engine=settings.engine,
        epoch=epoch,
        level=COPIED,
        method="blend",
        setting=certified_setting(cache_config),
        made=datetime.now(UTC).date().isoformat(),
        dejakv_version=__version__,
        counts=counts,
        settings=_kept(settings),
        **rules,
    )


def audit(
    certificate: Certificate, overrides: Mapping[str, Any], watch: RunProgress | None = None, engine: Any = None
) -> CertificateAudit:
    """Run a later log with a certificate's settings, overridden by `overrides` (`RunSettings.named`), and compare.

    Raises: ConfigError for another model or engine than the certificate's; the errors of `certify`.
    """
    epoch, hits, _ = _ran(_fixed(settings_of({**certificate.settings, **overrides})), watch or RunProgress(), engine)
    # After the run, since the epoch is that of the loaded model and no setting tells it.
    if epoch != certificate.epoch:
        raise ConfigError(
            f"the certificate is of another model or engine: it names {certificate.model} on {certificate.engine}, and their epoch is "
            "another now; make it again with `dejakv certify`"
        )

    return certificate.audit(hits)


class _PlanObserver(Observer):
    """Notes the approximate plan of each request, by its id: risk, tokens and features."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, int, dict[str, float]]] = {}

    def decided(self, prepared: Prepared, decision: Decision) -> Decision:
        plan, tokens = decision.plan, len(prepared.token_ids)
        if plan.approximate:
            features = features_of(plan, decision.found, tokens)
            self.found[prepared.request.id] = risk_of(plan.method, features), tokens, features
        return decision


def _ran(settings: RunSettings, watch: RunProgress, engine: Any) -> tuple[str, list[CertifiedHit], dict[str, int]]:
    """Reads the log and runs it (`_both_ways`)."""
    settings, read = chosen_samples(settings)
    chosen = [replace(sample, id=f"request-{number}") for number, sample in enumerate(read)]  # a log may repeat its ids
    for line in settings.implied:
        watch.stage(line)
    if engine is not None:
        return _both_ways(settings, chosen, watch, engine)

    watch.stage(f"loading {settings.model}")
    with opened(settings) as engine:
        return _both_ways(settings, chosen, watch, engine)


def _both_ways(
    settings: RunSettings, chosen: Sequence[Sample], watch: RunProgress, engine: Any
) -> tuple[str, list[CertifiedHit], dict[str, int]]:
    """Every request with reuse and in full, in one process: the epoch, the hits, and how many `requests` there were and were `not_run`.
    A hit is a request whose answer was approximate."""
    prompter, plans = SamplePrompter.of(settings, open_templates(settings)), _PlanObserver()
    with cache_folder(settings) as inside:
        pipelines = {arm: pipeline_for(arm, engine, inside.cache) for arm in ("cache", "none")}
        cache = pipelines["cache"].cache
        assert cache is not None
        cache.observers.append(plans)
        try:
            rows, stopped = serve_all(pipelines, chosen, inside, engine, prompter, watch)
        finally:
            close_all(pipelines)

    if stopped:  # the evidence holds at any length of the log
        watch.stage(f"stopped after {len(rows)} of {len(chosen)} requests: the certificate is of these")
    not_run = {row.sample_id: row.error for row in rows if row.error}
    check_ran(not_run, len(rows))
    differs, hits = differs_of(settings.cache.differs), list[CertifiedHit]()
    for sample, row in zip(chosen, rows, strict=False):  # an interrupt leaves samples without a row
        if not row.error and row.arms["cache"].record.approximate:
            risk, tokens, features = plans.found[sample.id]
            hits.append(CertifiedHit(risk, _wrong(differs, prompter.request(sample), row), tokens, features))

    return engine.epoch, hits, {"requests": len(rows), "not_run": len(not_run)}


def _wrong(differs: AnswerComparison, request: Request, row: SampleRow) -> bool:
    """Whether the reused answer is wrong. A function that raises says so, as it does under an error bound."""
    try:
        return bool(differs.wrong(request, _seen(row.arms["none"]), _seen(row.arms["cache"])))
    except Exception as error:
        logger.warning("differs raised %s: the answer counts as wrong", type(error).__name__)
        return True


def _seen(outcome: ArmOutcome) -> ComparedAnswer:
    return ComparedAnswer(outcome.text, () if outcome.first_token is None else (outcome.first_token,))


def _fixed(settings: RunSettings) -> RunSettings:
    """The settings, with answers long enough for the comparison. Raises: ConfigError for a comparison of distributions."""
    differs = differs_of(settings.cache.differs)
    if differs.logits:
        raise ConfigError(
            f"--differs {settings.cache.differs} compares distributions, and vLLM's connector has none: give first, answer or a function"
        )
    if settings.temperature:
        raise ConfigError("answers of a certificate are compared, so that they are greedy: leave --temperature out")

    cache_config = settings.cache
    settings = settings_of({**settings.named(), **FIXED})
    # No bound while evidence is collected: its gate would hold back the hits to be judged.
    cache = replace(settings.cache, error_bound=None, differs=cache_config.differs)
    return replace(settings, cache=cache, max_new_tokens=differs.tokens or settings.max_new_tokens)


def _kept(settings: RunSettings) -> dict[str, Any]:
    """Settings other than the defaults, as JSON gives them back."""
    # Through JSON, so that tuples compare as the lists that a file gives back.
    plain, named = (json.loads(json.dumps(each.named())) for each in (RunSettings(), settings))
    return {name: value for name, value in named.items() if value != plain[name] and name not in NOT_KEPT}

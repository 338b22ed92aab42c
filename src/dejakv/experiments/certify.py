"""`dejakv certify`: every would-be hit of a log with and without reuse, and what that certifies."""

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
from dejakv.decide.plan import COPIED, Decision, RequestObserver
from dejakv.engines.open import open_templates
from dejakv.errors import ConfigError
from dejakv.experiments.compare import check_ran, close_all, engine_context, pipeline_for, serve_all
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
"""Settings that a certificate leaves out: paths of this machine, and what follows from others."""


def data_of(log: str) -> dict[str, Any]:
    """Return the settings for a log: a file of requests, or else the name of a data set.

    A file that is called like a data set is the file.
    """
    if log in KNOWN and not Path(log).is_file():
        return {"dataset": log}
    return {"dataset": "log", "dataset_path": log}


def certify(
    settings: RunSettings, watch: RunProgress | None = None, engine: Any = None
) -> Certificate:
    """Run a log with and without reuse, and certify which hits the error bound allows.

    The settings in `FIXED` replace the caller's, so that copied text alone is blended.

    Parameters
    ----------
    settings : RunSettings
        Settings with the log as data set, and `settings.cache.error_bound`.
    watch : RunProgress, optional
        Observer of stages and samples.
    engine : optional
        Engine that is loaded already; without it the engine of the settings is opened and closed.

    Raises
    ------
    ConfigError
        Without a bound, for a comparison of distributions, and for answers that are sampled.
    DatasetError
        For a log that cannot be read or has no prompts.
    ModelError
        For a model that cannot be loaded.
    InputError
        If none of the requests could run.
    """
    cache_config = settings.cache
    if cache_config.error_bound is None:
        raise ConfigError(NO_BOUND)

    epoch, hits, ran = _run_log(_certify_settings(settings), watch or RunProgress(), engine)
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
        settings=_portable_settings(settings),
        **rules,
    )


def audit(
    certificate: Certificate,
    overrides: Mapping[str, Any],
    watch: RunProgress | None = None,
    engine: Any = None,
) -> CertificateAudit:
    """Run a later log with a certificate's settings, and compare the hits with its promise.

    Parameters
    ----------
    certificate : Certificate
        The certificate whose promise is compared.
    overrides : mapping
        Settings that replace the certificate's, by name (`RunSettings.named`).
    watch : RunProgress, optional
        Observer of stages and samples.
    engine : optional
        Engine that is loaded already.

    Raises
    ------
    ConfigError
        For another model or engine than the certificate's, which is known only after the run, and
        for unknown overrides. The other errors are those of `certify`.
    """
    epoch, hits, _ = _run_log(
        _certify_settings(settings_of({**certificate.settings, **overrides})),
        watch or RunProgress(),
        engine,
    )

    # After the run, since the epoch is that of the loaded model and no setting tells it.
    if epoch != certificate.epoch:
        raise ConfigError(
            f"the certificate is of another model or engine: it names {certificate.model} on"
            f" {certificate.engine}, and their epoch is another now; make it again with `dejakv"
            " certify`"
        )

    return certificate.audit(hits)


class _PlanObserver(RequestObserver):
    """Observer that notes the approximate plan of each request: risk, tokens and features."""

    def __init__(self) -> None:
        self.approximate_plans: dict[str, tuple[float, int, dict[str, float]]] = {}

    def review_decision(self, prepared: Prepared, decision: Decision) -> Decision:
        plan, tokens = decision.plan, len(prepared.token_ids)
        if plan.approximate:
            features = features_of(plan, decision.donor_search, tokens)
            self.approximate_plans[prepared.request.id] = (
                risk_of(plan.method, features),
                tokens,
                features,
            )
        return decision


def _run_log(
    settings: RunSettings, watch: RunProgress, engine: Any
) -> tuple[str, list[CertifiedHit], dict[str, int]]:
    """Read the log, and run it (`_both_ways`)."""
    settings, read = chosen_samples(settings)
    # A log may repeat its ids.
    chosen = [replace(sample, id=f"request-{number}") for number, sample in enumerate(read)]
    for line in settings.implied:
        watch.stage(line)

    # An engine of the caller's stays open: a test or a second log goes on with it.
    if engine is not None:
        return _both_ways(settings, chosen, watch, engine)

    watch.stage(f"loading {settings.model}")
    with engine_context(settings) as engine:
        return _both_ways(settings, chosen, watch, engine)


def _both_ways(
    settings: RunSettings, chosen: Sequence[Sample], watch: RunProgress, engine: Any
) -> tuple[str, list[CertifiedHit], dict[str, int]]:
    """Run every request with reuse and in full, in one process.

    Returns
    -------
    tuple of str, list[CertifiedHit] and dict[str, int]
        The epoch; the requests whose answer was approximate; and how many `requests` there were and
        how many of these were `not_run`.
    """
    prompter, plans = SamplePrompter.for_run(settings, open_templates(settings)), _PlanObserver()
    with cache_folder(settings) as inside:
        pipelines = {arm: pipeline_for(arm, engine, inside.cache) for arm in ("cache", "none")}
        cache = pipelines["cache"].cache
        assert cache is not None
        cache.observers.append(plans)
        try:
            rows, stopped = serve_all(pipelines, chosen, inside, engine, prompter, watch)
        finally:
            close_all(pipelines)

    # A stopped run is good evidence: it holds at any length of the log.
    if stopped:
        watch.stage(
            f"stopped after {len(rows)} of {len(chosen)} requests: the certificate is of these"
        )
    not_run = {row.sample_id: row.error for row in rows if row.error}
    check_ran(not_run, len(rows))
    differs, hits = differs_of(settings.cache.differs), list[CertifiedHit]()

    # Not strict, as an interrupt leaves samples without a row.
    for sample, row in zip(chosen, rows, strict=False):
        if not row.error and row.arms["cache"].record.approximate:
            risk, tokens, features = plans.approximate_plans[sample.id]
            hits.append(
                CertifiedHit(risk, _wrong(differs, prompter.request(sample), row), tokens, features)
            )

    return engine.epoch, hits, {"requests": len(rows), "not_run": len(not_run)}


def _wrong(differs: AnswerComparison, request: Request, row: SampleRow) -> bool:
    """Tell whether the reused answer is wrong; a function that raises says so, as under a bound."""
    try:
        return bool(
            differs.wrong(
                request, _compared_answer(row.arms["none"]), _compared_answer(row.arms["cache"])
            )
        )
    except Exception as error:
        logger.warning("differs raised %s: the answer counts as wrong", type(error).__name__)
        return True


def _compared_answer(outcome: ArmOutcome) -> ComparedAnswer:
    return ComparedAnswer(
        outcome.text, () if outcome.first_token is None else (outcome.first_token,)
    )


def _certify_settings(settings: RunSettings) -> RunSettings:
    """Return the settings with `FIXED`, no bound, and answers long enough for the comparison.

    Raises
    ------
    ConfigError
        For a comparison of distributions, and for answers that are sampled.
    """
    differs = differs_of(settings.cache.differs)
    if differs.logits:
        raise ConfigError(
            f"--differs {settings.cache.differs} compares distributions, and vLLM's connector has"
            " none: give first, answer or a function"
        )
    if settings.temperature:
        raise ConfigError(
            "answers of a certificate are compared, so that they are greedy: leave"
            " --temperature out"
        )

    cache_config = settings.cache
    settings = settings_of({**settings.named(), **FIXED})

    # No bound while evidence is collected: its gate would hold back the hits to be judged.
    cache = replace(settings.cache, error_bound=None, differs=cache_config.differs)
    return replace(settings, cache=cache, max_new_tokens=differs.tokens or settings.max_new_tokens)


def _portable_settings(settings: RunSettings) -> dict[str, Any]:
    """Return the settings other than the defaults, as JSON gives them back."""
    # Through JSON, so that tuples compare as the lists that a file gives back.
    plain, named = (json.loads(json.dumps(each.named())) for each in (RunSettings(), settings))
    return {
        name: value
        for name, value in named.items()
        if value != plain[name] and name not in NOT_KEPT
    }

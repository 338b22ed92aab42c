"""The same samples through every arm of a comparison, interleaved in one process.

The arms are `none` (nothing reused), `prefix` (exact prefixes alone) and `cache` (all of it).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.datasets.base import Sample
from dejakv.engines.open import open_engine
from dejakv.errors import InputError
from dejakv.experiments.samples import SamplePrompter
from dejakv.experiments.samples_log import SamplesLog
from dejakv.experiments.settings import Arm, RunSettings
from dejakv.experiments.summary import STEPS, ArmOutcome, RunProgress, SampleRow, exact_of, fidelity
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.counters import FAILED_WRITES


def pipeline_for(
    arm: Arm, engine: Any, config: SemanticCacheConfig, name: str = "", *, promotes: bool = False
) -> Pipeline:
    """Build the pipeline of one arm.

    Only the `cache` arm has encoder outputs, a cache directory and semantic levels, and promotes.

    Parameters
    ----------
    arm : {"none", "prefix", "cache"}
        What the arm may reuse.
    engine : Engine
        The model, which all arms share.
    config : SemanticCacheConfig
        Settings of the cache; of these `prefix` takes the budgets and the eviction policy alone.
    name : str
        Distinguishes arms of one kind, if several caches with different settings are compared. They
        share no state.
    promotes : bool
        Whether idle time computes approximate prompts exactly.
    """
    arm_engine = engine.for_arm(arm, name or arm)
    if arm == "none":
        return Pipeline(arm_engine)
    # The prefix caching of a good engine: exact prefixes of earlier prompts, and nothing else.
    if arm == "prefix":
        plain = SemanticCacheConfig(
            exact_text=False, free_order=False, semantic_text=False,
            max_bytes=config.max_bytes, max_cached_blocks=config.max_cached_blocks,
            policy=config.policy,
        )  # fmt: skip
        return Pipeline(arm_engine, build_cache(plain, None))

    cache = build_cache(config, arm_engine)

    # Over a cache directory, the first samples find what it holds.
    cache.flush()
    return Pipeline(arm_engine, cache, promotes=promotes)


def sizes_of(cache: HierarchicalCache, engine: Any) -> dict[str, Any]:
    """Return the sizes and counts of a cache, for a run's summary.

    These are the bytes of stored state (in the engine, if it keeps state itself) and of the vectors
    in the indexes, counts of the store and of the embedding hook, and with an error bound its
    `TrustReport` as `trust`.
    """
    stats = cache.store.stats()
    # An engine that keeps state itself puts none into the pipeline's store.
    stored_bytes = engine.state_bytes() if engine.holds_state else stats.bytes
    sizes: dict[str, Any] = {
        "store_bytes": stored_bytes,
        "store_entries": stats.entries,
        "bytes_per_chunk": round(stored_bytes / stats.entries) if stats.entries else 0,
        "index_bytes": sum(int(getattr(level, "nbytes", 0)) for level in cache.finder.levels),
        "evictions": dict(stats.evictions),
        "corrupt": stats.corrupt,
        "failed_writes": {
            reason: stats.refused[reason] for reason in FAILED_WRITES if stats.refused.get(reason)
        },
    }

    if counts := cache.embed_counts:
        sizes["hook_counts"] = counts
    if (trust := cache.trust(None)) is not None:
        sizes["trust"] = asdict(trust)
    return sizes


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison.

    Attributes
    ----------
    rows : tuple[SampleRow, ...]
        The finished samples, in the order of the run.
    sizes : dict
        Sizes and counts of the cache (`sizes_of`); empty without the `cache` arm.
    stopped : bool
        Whether an interrupt ended the run before the last sample.
    """

    rows: tuple[SampleRow, ...]
    sizes: dict[str, Any]
    stopped: bool = False


def compare(
    settings: RunSettings,
    chosen: Sequence[Sample],
    engine: Any,
    prompter: SamplePrompter,
    watch: RunProgress,
    log: SamplesLog | None = None,
) -> ComparisonResult:
    """Build the arms of the settings, serve every sample in each (`serve_all`), and close them.

    The `cache` arm takes part only if `cache_mode` is `live`.
    """
    live = settings.cache_mode == "live"
    arms: list[Arm] = [arm for arm in settings.arms if live or arm != "cache"]
    pipelines: dict[str, Pipeline] = {
        arm: pipeline_for(arm, engine, settings.cache, promotes=settings.promote) for arm in arms
    }
    cache = pipelines["cache"].cache if "cache" in pipelines else None

    # A filled cache has an advantage over arms that begin empty: the report says so.
    started_with = cache.store.stats().entries if cache is not None else 0
    rows, stopped = serve_all(pipelines, chosen, settings, engine, prompter, watch, log)
    sizes: dict[str, Any] = {}
    if cache is not None:
        # Saves may still be under way, and the sizes count what is written.
        cache.flush()
        sizes = {**sizes_of(cache, pipelines["cache"].engine), "started_with_chunks": started_with}

    close_all(pipelines)
    return ComparisonResult(rows, sizes, stopped)


def sampling_of(settings: RunSettings) -> Sampling:
    """Return the sampling parameters of a run's answers."""
    return Sampling(settings.max_new_tokens, settings.temperature, seed=settings.seed)


def serve_all(
    pipelines: Mapping[str, Pipeline],
    chosen: Sequence[Sample],
    settings: RunSettings,
    engine: Any,
    prompter: SamplePrompter,
    watch: RunProgress,
    log: SamplesLog | None = None,
) -> tuple[tuple[SampleRow, ...], bool]:
    """Serve every sample through every pipeline.

    A sample that cannot run (InputError) is a row with its reason, and the others go on. The first
    sample that can run warms the model up before, without a cache and outside of all figures.

    Parameters
    ----------
    pipelines : mapping of str to Pipeline
        The arms, by name.
    chosen : sequence of Sample
        The samples in the order of the run.
    settings : RunSettings
        Settings of the run.
    engine : Engine
        The model, to warm it up.
    prompter : SamplePrompter
        Renders samples as requests.
    watch : RunProgress
        Observer of stages and samples.
    log : SamplesLog, optional
        Records each finished row. Rows already in it are not measured again: their prompts only
        fill the arms' caches, so that later samples meet the same caches.

    Returns
    -------
    tuple of rows and bool
        The rows, and whether an interrupt (Ctrl-C) ended the run before the last sample.

    Raises
    ------
    ConfigError
        For a chunk source that a sample lacks.
    OutputError
        If the log cannot be written.
    """
    sampling = sampling_of(settings)
    rows = list(log.rows) if log is not None else []
    try:
        watch.stage("warming up")
        _warm_up(engine, chosen, prompter, sampling)
        # A row with an error has put nothing into a cache, so there is nothing to replay.
        done = [(sample, row) for sample, row in zip(chosen, rows, strict=False) if not row.error]
        if done:
            watch.stage(f"filling the caches with the {len(done)} prompts that are done")
        for sample, row in done:
            request = prompter.request(sample, sampling)
            for name, pipeline in pipelines.items():
                if pipeline.cache is not None:
                    replay(pipeline, request, row.arms.get(name))

        watch.stage(f"{settings.model}, {' and '.join(pipelines)}")
        for number, sample in enumerate(chosen[len(rows) :], start=len(rows)):
            try:
                request = prompter.request(sample, sampling)
                row = _serve(pipelines, sample, request, first=number)
            except InputError as error:
                row = SampleRow(
                    sample.id,
                    sample.question,
                    sample.answer,
                    scored=sample.scored,
                    error=str(error),
                )
            rows.append(row)
            if log is not None:
                log.append(row)
            watch.sample(number + 1, len(chosen), row)
    except KeyboardInterrupt:
        return tuple(rows), True

    return tuple(rows), False


def _warm_up(
    engine: Any, chosen: Sequence[Sample], prompter: SamplePrompter, sampling: Sampling
) -> None:
    """Run the first sample that can run, outside of all figures."""
    for sample in chosen:
        with suppress(InputError):
            Pipeline(engine.for_arm("none")).answer(prompter.request(sample, sampling))
            return


def check_ran(errors: Mapping[str, str], total: int) -> None:
    """Raise an InputError if none of the samples could run."""
    if total and len(errors) == total:
        first, reason = next(iter(errors.items()))
        raise InputError(
            f"sample {first} could not run{f', nor any other of {total}' if total > 1 else ''}:"
            f" {reason}"
        )


def close_all(pipelines: Mapping[str, Pipeline]) -> None:
    """Close the arms' caches."""
    for pipeline in pipelines.values():
        if pipeline.cache is not None:
            pipeline.cache.close()


def _serve(
    pipelines: Mapping[str, Pipeline], sample: Sample, request: Request, *, first: int
) -> SampleRow:
    """Serve one sample in all arms.

    Another arm goes first each time, so that none always profits from warm memory caches. Their
    order turns round as well, since an arm stores while the next one runs, and nobody waits for it.
    """
    names = list(pipelines)
    turns = [names[(turn + first) % len(names)] for turn in range(len(names))]
    turns = turns if first // len(names) % 2 == 0 else turns[::-1]
    answers = {name: pipelines[name].answer(request) for name in turns}

    # Only when all arms have answered: the idle work of one must not slow another down.
    for pipeline in pipelines.values():
        _idle(pipeline)
    full = exact_of(answers)

    # Teacher forcing: each arm is scored along the full answer's tokens and not its own.
    tokens = full.token_ids[:STEPS] if full is not None else ()
    full_logprobs = full.completion.continued(tokens) if full is not None else None
    outcomes: dict[str, ArmOutcome] = {}
    for name in names:
        answer = answers[name]
        answer_fidelity = fidelity(
            full_logprobs,
            answer.completion.continued(tokens) if full_logprobs is not None else None,
        )
        start = answer.token_ids[0] if answer.token_ids else None
        outcomes[name] = ArmOutcome(
            answer.record,
            answer.text,
            answer.cached_answer,
            start,
            answer_fidelity,
            donors_of(answer),
        )

    return SampleRow(sample.id, sample.question, sample.answer, outcomes, sample.scored)


def donors_of(answer: Answer) -> tuple[str, ...]:
    """Return the names of the requests whose state an answer used, best first."""
    decision, method = answer.decision, answer.record.method
    plans = (decision.plan, decision.exact) if decision is not None else ()
    # A refused plan falls back to the exact one, so that the record's method tells which ran.
    executed_plan = next((way for way in plans if way.method == method), None)
    return (
        tuple(str(donor.metadata.get("request", donor.id)) for donor in executed_plan.donors)
        if executed_plan is not None
        else ()
    )


def replay(pipeline: Pipeline, request: Request, earlier_outcome: ArmOutcome | None) -> None:
    """Serve a prompt of an earlier run again, to give cache and error bound the same content.

    Parameters
    ----------
    pipeline : Pipeline
        A pipeline with a cache.
    request : Request
        The prompt; one token is generated where no label needs more.
    earlier_outcome : ArmOutcome or None
        The prompt's outcome in the earlier run, if known. Without an error bound, a prompt that
        was answered exactly then is answered exactly again.
    """
    assert pipeline.cache is not None
    differs = pipeline.cache.queue.differs
    if differs is None and earlier_outcome is not None and not earlier_outcome.record.approximate:
        request = replace(request, reuse="exact")

    # A short answer would teach an error bound wrongly.
    whole = differs is not None and differs.tokens != 1
    pipeline.answer(request if whole else shortened(request))
    _idle(pipeline)

    # Saves run in the background, and the next prompt must find this one's state.
    pipeline.cache.flush()


def shortened(request: Request) -> Request:
    """Return the request with an answer of one token: its prompt is computed and kept as before."""
    return replace(request, sampling=replace(request.sampling, max_new_tokens=1))


def _idle(pipeline: Pipeline) -> None:
    """Do the idle work behind a request: label would-be hits, and settle a prompt if promoting."""
    while pipeline.label_one():
        pass
    if pipeline.promotes:
        pipeline.promote_one()


def bf16_agreement(
    settings: RunSettings,
    chosen: Sequence[Sample],
    rows: Sequence[SampleRow],
    prompter: SamplePrompter,
    watch: RunProgress,
) -> dict[str, int] | None:
    """Count how many exact answers of the first samples bf16 gives too, without reuse.

    Parameters
    ----------
    settings : RunSettings
        Settings of the run; `settings.rounding` samples are compared.
    chosen : sequence of Sample
        The samples of the run.
    rows : sequence of SampleRow
        Their rows, whose exact answers are those of float32.
    prompter : SamplePrompter
        Renders samples as requests.
    watch : RunProgress
        Observer of stages and samples.

    Returns
    -------
    dict or None
        `samples`, and of these with `same_first` token and the `same` answer; None if no comparison
        was asked for or no row has an exact answer.
    """
    judged = [
        (sample, row.exact)
        for sample, row in zip(chosen, rows, strict=False)
        if row.exact is not None
    ]
    judged = judged[: settings.rounding]
    if not judged:
        return None

    watch.stage("the same in bf16, without reuse")
    same: list[tuple[bool, bool]] = []
    with engine_context(replace(settings, dtype="bf16", rounding=0)) as engine:
        for done, (sample, exact) in enumerate(judged, start=1):
            answer = Pipeline(engine).answer(prompter.request(sample, sampling_of(settings)))
            same.append((answer.token_ids[:1] == (exact.first_token,), answer.text == exact.text))
            watch.sample(done, len(judged), None)

    # Counts of True in both columns: the first token, and the whole answer.
    first, whole = (sum(marks) for marks in zip(*same, strict=True))
    return {"samples": len(same), "same_first": first, "same": whole}


@contextmanager
def engine_context(settings: RunSettings) -> Iterator[Any]:
    """Open the engine of these settings, and close it: a process can have one vLLM at a time."""
    if settings.engine == "vllm":
        from dejakv.experiments.vllm_engine import open_vllm

        engine: Any = open_vllm(settings, settings.cache)
    else:
        engine = open_engine(settings, settings.cache)

    try:
        yield engine
    finally:
        engine.close()

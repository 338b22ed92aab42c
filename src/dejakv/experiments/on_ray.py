"""Runs, sweeps and estimates on a cluster of Ray.

Their results are those of one process, except for what `run_on` says of its stream.

Every machine of the cluster needs this package, the models, and paths that mean the same
everywhere: output folders, logs and a store in a folder are on a file system that all share. Ray
gives objects from process to process by pickle: a cluster is trusted as a whole.
"""

import logging
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.config import SemanticCacheConfig
from dejakv.datasets.base import Sample
from dejakv.datasets.entries import Entry, Skipped
from dejakv.datasets.log import RequestLog
from dejakv.errors import ConfigError, DejaKVError, InputError, MissingExtraError
from dejakv.experiments.compare import check_ran
from dejakv.experiments.estimate import (
    EstimatedPrompt,
    RequestStream,
    estimated_prompts,
    labelled_by,
    tally,
)
from dejakv.experiments.output import write_run
from dejakv.experiments.run import (
    RunResult,
    add_run_context,
    chosen_samples,
    output_locked,
    run_chosen,
)
from dejakv.experiments.samples_log import SamplesLog, earlier_run
from dejakv.experiments.savings import SavingsCounter
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.shares import shares_of, tokenize_samples
from dejakv.experiments.summary import RunProgress, SampleRow, summarize
from dejakv.experiments.sweep import SweepExperiment, failed_line, run_experiment
from dejakv.settings import is_memory
from dejakv.vectors.base import TextEncoder
from dejakv.vectors.text import ModelTextEncoder, text_encoder, varying_part

PART = 16 << 20
"""Bytes of a log that one task reads."""
ROWS = 256
"""Requests in a block of Ray Data."""


@dataclass(frozen=True)
class RayCluster:
    """Cluster of Ray that this process is connected to.

    Attributes
    ----------
    cpus, gpus : int
        Cores and GPUs of all machines together.
    machines : int
        Machines that are alive.
    """

    cpus: int
    gpus: int
    machines: int

    @classmethod
    def connect(cls, address: str) -> "RayCluster":
        """Connect to a cluster, once for each process.

        A process that is connected already keeps its cluster, whatever the address. Ray's
        statistics of use are switched off, unless RAY_USAGE_STATS_ENABLED is set.

        Parameters
        ----------
        address : str
            `local` starts a cluster of this machine; `auto`, HOST:PORT or ray://HOST:PORT is one
            that runs.

        Raises
        ------
        MissingExtraError
            Without Ray.
        ConfigError
            If nothing answers at the address.
        """
        # Ray would send statistics to its makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise MissingExtraError("ray", "ray", "--ray") from None

        # A process connects once; a second command in it shares the connection.
        if not ray.is_initialized():
            try:
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:
                why = str(error).partition("\n")[0][:200]
                raise ConfigError(
                    f"--ray {address!r} cannot be reached ({type(error).__name__}: {why}): start it"
                    " with `ray start --head`, or give --ray alone for a cluster of this machine"
                ) from None

        has: Mapping[str, float] = ray.cluster_resources()
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        return cls(int(has.get("CPU", 1)) or 1, int(has.get("GPU", 0)), alive)

    def map_unordered(
        self,
        call: Callable[..., Any],
        items: Sequence[tuple[Any, ...]],
        cpus: int = 1,
        *,
        model: bool = True,
    ) -> Iterator[tuple[int, Any]]:
        """Call a function with each item's arguments, and yield results as they are done.

        An interrupt ends all calls.

        Parameters
        ----------
        call : callable
            A function that the workers can import.
        items : sequence of tuples
            Arguments of each call.
        cpus : int
            Cores of each call.
        model : bool
            Whether the function runs a model: a GPU for each call, if the cluster has any.

        Yields
        ------
        tuple of int and object
            The number of the item, and its result. An error of this package, and the death of a
            worker, is a result too.

        Raises
        ------
        ray.exceptions.RayTaskError
            If the function raises any other error; calls under way are ended.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        # No retries: a worker that ran out of memory would do so again.
        task = ray.remote(_result_or_error).options(
            num_cpus=cpus, num_gpus=int(model and self.gpus > 0), max_retries=0
        )
        pending = {task.remote(call, *item): number for number, item in enumerate(items)}
        try:
            while pending:
                for done in ray.wait(list(pending))[0]:
                    try:
                        result = ray.get(done)
                    except RayTaskError:
                        # The call raised what is no error of this package: a mistake of the code.
                        raise
                    except RayError as error:
                        why = str(error).partition("\n")[0][:200]
                        result = ConfigError(
                            f"a worker of Ray ended ({type(error).__name__}: {why}): give it more"
                            " memory"
                        )
                    yield pending.pop(done), result
        finally:
            # Tasks are left only after an interrupt or a mistake, and nobody waits for them then.
            for ref in pending:
                ray.cancel(ref, force=True)

    def map_ordered(
        self,
        call: Callable[..., Any],
        items: Sequence[tuple[Any, ...]],
        cpus: int = 1,
        *,
        model: bool = True,
    ) -> list[Any]:
        """Return the results of `map_unordered` in the order of the items.

        The first result that is an error of this package is raised.
        """
        results = dict(
            _raise_error(numbered_result)
            for numbered_result in self.map_unordered(call, items, cpus, model=model)
        )
        return [results[number] for number in range(len(items))]


def _result_or_error(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, or the error of this package that it raised."""
    try:
        return call(*arguments)
    except MissingExtraError as error:
        # A MissingExtraError cannot be made again from its message, as pickle would.
        return ConfigError(str(error))
    except DejaKVError as error:
        return error


def _raise_error(numbered_result: tuple[int, Any]) -> tuple[int, Any]:
    if isinstance(numbered_result[1], DejaKVError):
        raise numbered_result[1]
    return numbered_result


def experiments_on(
    cluster: RayCluster,
) -> Callable[[Sequence[SweepExperiment], bool, RunProgress], Iterator[dict[str, Any]]]:
    """Return a function for `sweep(lines=...)` that runs each experiment as a task of the cluster.

    It yields a line as each experiment ends, in any order. A failed one gives a line too.
    """

    def lines(
        waiting: Sequence[SweepExperiment], purge: bool, watch: RunProgress
    ) -> Iterator[dict[str, Any]]:
        watch.stage(f"{len(waiting)} experiments on Ray")
        for number, (place, line) in enumerate(
            cluster.map_unordered(run_experiment, [(experiment, purge) for experiment in waiting]),
            1,
        ):
            yield failed_line(waiting[place], str(line)) if isinstance(line, DejaKVError) else line
            watch.sample(number, len(waiting), None)

    return lines


def run_on(
    cluster: RayCluster,
    settings: RunSettings,
    watch: RunProgress,
    *,
    workers: int = 0,
    resume: bool = False,
) -> RunResult:
    """Run a comparison on workers that share one store, as servers behind a balancer do.

    Sample i is of worker i modulo `workers`, and what one worker stores the others find. Prefix
    caching is each worker's own. Rows are merged in the order of the samples.

    Parameters
    ----------
    cluster : RayCluster
        The cluster.
    settings : RunSettings
        Settings of the run.
    watch : RunProgress
        Observer of stages.
    workers : int
        Number of workers, at most one for each sample. 0: one for each GPU of the cluster, or else
        for each core.
    resume : bool
        Whether to continue the stopped run in the output folder.

    Raises
    ------
    ConfigError
        For a dry run, an error bound, a store in memory, and several machines without a store that
        they share. The other errors are those of `run`.
    """
    settings, chosen = chosen_samples(settings, resume)
    workers = min(workers or cluster.gpus or cluster.cpus, len(chosen))
    _check(settings, cluster)

    with output_locked(settings):
        if (finished_run := earlier_run(settings, chosen, resume=resume)) is not None:
            return RunResult(*finished_run, Path(settings.output or ""), earlier=True)
        watch.stage(f"{settings.model}, {workers} workers on Ray")
        output = settings.output
        store_folder = (
            Path(output, "store")
            if output is not None
            else Path(tempfile.mkdtemp(prefix="dejakv-run-"))
        )
        shared = replace(
            settings, cache=replace(settings.cache, store=settings.cache.store or str(store_folder))
        )
        parts = [
            (
                replace(shared, output=str(Path(output, f"worker-{n}")) if output else None),
                chosen[n::workers],
            )
            for n in range(workers)
        ]
        part = partial(run_chosen, watch=RunProgress(), resume=resume)
        results: list[RunResult] = cluster.map_ordered(part, parts, max(1, cluster.cpus // workers))
        # Undo the split by turns, so that rows stand in the order of the samples.
        rows = [results[place % workers].rows[place // workers] for place in range(len(chosen))]
        # With --store this folder was never used, and the user's is left alone.
        shutil.rmtree(store_folder, ignore_errors=True)
        return _merged(settings, chosen, rows, results)


def _check(settings: RunSettings, cluster: RayCluster) -> None:
    store = settings.cache.store
    if settings.cache_mode == "dry-run":
        raise ConfigError(
            "--ray runs a model, and --cache-mode dry-run does not: leave --ray out, or see `dejakv"
            " estimate --ray`"
        )
    if settings.cache.error_bound is not None:
        raise ConfigError(
            "--error-bound is learned from one stream of requests: leave it or --ray out"
        )
    if store is not None and is_memory(store):
        raise ConfigError(
            f"--store {store!r} is the memory of one process: give a folder or a bucket, which the"
            " workers of --ray share"
        )
    if cluster.machines > 1 and store is None:
        raise ConfigError(
            "the workers of --ray are on several machines: give the --store that they share, such"
            " as s3://BUCKET/PREFIX"
        )


def _merged(
    settings: RunSettings,
    chosen: Sequence[Sample],
    rows: Sequence[SampleRow],
    results: Sequence[RunResult],
) -> RunResult:
    """Write and return the run of all workers."""
    each = [result.summary for result in results]
    note = (
        f"{len(each)} workers on Ray shared the store and ran side by side, each with every"
        f" {len(each)}th sample; prefix caching is each worker's own"
    )
    settings = replace(settings, implied=(*settings.implied, note))
    if settings.output is not None:
        log = SamplesLog(Path(settings.output), settings.named(), chosen)
        # Those before were in the log of the run that is resumed.
        for row in rows[len(log.rows) :]:
            log.append(row)
        log.close()
    summary = summarize(rows, settings.model, settings.dataset, _sizes(each))
    check_ran(summary["not_run"], len(rows))
    add_run_context(summary, settings, chosen)
    summary["measured"] = each[0]["measured"]
    if not any(sample.media for sample in chosen):
        served = [
            served_sample for served_sample, row in zip(chosen, rows, strict=True) if not row.error
        ]
        summary |= shares_of(prepared for _, prepared in tokenize_samples(served, settings))

    return RunResult(summary, tuple(rows), write_run(settings.output, summary))


def _sizes(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sizes of the shared store, and sums of what each worker has or did.

    The last worker saw the store as a whole, so that its bytes and entries are the largest.
    """
    first = each[0]
    sizes: dict[str, Any] = {"workers": len(each)}
    for name in ("store_bytes", "store_entries"):
        if name in first:
            sizes[name] = max(worker_sizes[name] for worker_sizes in each)

    if "store_bytes" in sizes:
        sizes["bytes_per_chunk"] = (
            round(sizes["store_bytes"] / sizes["store_entries"]) if sizes["store_entries"] else 0
        )
        # A worker that starts late sees what others stored: the least is what was there before.
        sizes["started_with_chunks"] = min(
            worker_sizes["started_with_chunks"] for worker_sizes in each
        )
        sizes |= {
            name: sum(worker_sizes[name] for worker_sizes in each)
            for name in ("index_bytes", "corrupt")
        }
    for name in ("evictions", "failed_writes", "hook_counts"):
        if name in first:
            sizes[name] = dict(
                sum((Counter(worker_sizes[name]) for worker_sizes in each), Counter[str]())
            )

    return sizes


class RequestsOn(RequestStream):
    """Requests of a log, read and counted on a cluster, as `RequestStream` does in one process.

    Ray Data reads the file in parts. Tenants share nothing, so each is counted by one task, and
    every setting by a task of its own. The order of arrival is that of one process.

    Raises
    ------
    ConfigError
        For a data set in place of a file. The other errors are those of `estimate`.
    """

    def __init__(
        self,
        cluster: RayCluster,
        file: RequestLog | None,
        settings: RunSettings,
        label_with: str | None,
        watch: RunProgress,
    ) -> None:
        import ray.data

        if file is None:
            raise ConfigError(
                f"--ray reads a file in parts, and {settings.dataset!r} is a data set: leave"
                " --ray out"
            )

        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        self._cluster = cluster
        gpus = int(label_with is not None and cluster.gpus > 0)
        parts = ray.data.from_items([{"part": part} for part in file.parts(PART)])
        read: Any = partial(_read, settings=settings, label_with=label_with)
        data = parts.map_batches(read, batch_size=1, num_gpus=gpus).materialize()

        # Ray gives parts in any order; the place in the file comes first in a line.
        lines = sorted(_light(data))
        requests = [line for line in lines if line[1] == "request"]
        self.more = len(requests) > settings.max_samples

        # The first request beyond the limit: what stands behind it is not counted.
        last = requests[settings.max_samples][0] if self.more else math.inf

        for place, kind, detail, tenant, time, *_, lacks in lines:
            if place <= last:
                arrival = None if math.isnan(time) else time
                request = Entry(
                    place, detail, tenant=tenant, time=arrival, left_out=tuple(lacks.splitlines())
                )
                file.count_line(
                    place, {"request": request, "skipped": Skipped(detail)}.get(kind, detail)
                )
            # One process would have stopped before a failure that is beyond the limit.
            if kind == "failed" and place < last:
                raise InputError(detail)

        used = requests[: settings.max_samples]
        self.count = len(used)
        self.texts = sum(text for *_, text, _, _ in used)
        self.labelled = sum(labelled for *_, labelled, _ in used)
        by_time = not any(math.isnan(time) for _, _, _, _, time, *_ in used)
        self._blocks = data.to_arrow_refs()
        tenants = _balanced(Counter(line[3] for line in used), cluster.cpus)
        self._task_arguments = [
            (tenant_group, last, by_time, *self._blocks) for tenant_group in tenants
        ]
        self.savings = sum(
            cluster.map_ordered(_savings, self._task_arguments, model=False), SavingsCounter()
        )

    def tallies(
        self, tries: Sequence[SemanticCacheConfig], encoder: TextEncoder | None, watch: RunProgress
    ) -> list[Counter[str]]:
        """Return the counts of each setting, as `RequestStream.tallies` does."""
        import ray

        vectors = ray.put(self._encode_texts(encoder) if encoder is not None else None)
        items = [
            (config, vectors, *task_arguments)
            for config in tries
            for task_arguments in self._task_arguments
        ]
        counts_by_task: dict[int, Counter[str]] = {}

        for numbered_result in self._cluster.map_unordered(_tally, items, model=False):
            counts_by_task.update([_raise_error(numbered_result)])
            watch.sample(len(counts_by_task), len(items), None)

        # Item n * size + k is setting n over task k's tenants, whose counts add up.
        size = len(self._task_arguments)
        return [
            sum((counts_by_task[n * size + k] for k in range(size)), Counter[str]())
            for n in range(len(tries))
        ]

    def _encode_texts(self, encoder: TextEncoder) -> dict[str, Any]:
        """Return the vector of each text that levels compare.

        A model's own embeddings are looked up in this process, where the model is.
        """
        import ray

        texts = sorted(
            set[str]().union(*self._cluster.map_ordered(_texts, self._task_arguments, model=False))
        )
        if isinstance(encoder, ModelTextEncoder):
            return _encoded(encoder, texts)

        # Once into the object store, and not pickled again for each slice.
        encoder_ref = ray.put(encoder)
        slices = [(encoder_ref, texts[n :: self._cluster.cpus]) for n in range(self._cluster.cpus)]
        return {
            text: vector
            for vectors in self._cluster.map_ordered(_encoded, slices)
            for text, vector in vectors.items()
        }


_LIGHT = ("place", "kind", "what", "tenant", "time", "text", "labelled", "lacks")


def _light(data: Any) -> Iterator[tuple[Any, ...]]:
    for batch in data.select_columns(list(_LIGHT)).iter_batches(
        batch_size=None, batch_format="numpy"
    ):
        yield from zip(*(batch[name].tolist() for name in _LIGHT), strict=True)


def _read(
    batch: Mapping[str, Any], settings: RunSettings, label_with: str | None
) -> Iterator[dict[str, list[Any]]]:
    """Read a part of a log as rows: each line, its request without text, the text as tokens."""
    for part in batch["part"]:
        rows = list(_rows(part, settings, label_with))
        for begin in range(0, len(rows), ROWS):
            block = list(zip(*rows[begin : begin + ROWS], strict=True))
            yield {
                name: list(column)
                for name, column in zip((*_LIGHT, "entry", "asked"), block, strict=True)
            }


def _rows(
    part: RequestLog, settings: RunSettings, label_with: str | None
) -> Iterator[tuple[Any, ...]]:
    lines = list(part.read())
    samples = [
        line_content.sample
        for _, line_content in lines
        if isinstance(line_content, Entry) and line_content.sample is not None
    ]

    # Where a failure is reported that comes before the first line.
    place = part.first
    try:
        if label_with is not None:
            samples = labelled_by(
                label_with, samples, RunProgress(), raw_prompts=settings.raw_prompts
            )
        prompts = estimated_prompts(samples, settings)
        for place, line_content in lines:
            if not isinstance(line_content, Entry):
                kind = "skipped" if isinstance(line_content, Skipped) else "broken"
                yield place, kind, str(line_content), "", math.nan, False, False, "", None, None
                continue
            prompt = next(prompts) if line_content.sample is not None else None
            time = math.nan if line_content.time is None else line_content.time
            has_answer = prompt is not None and prompt.answer is not None
            lacks = "\n".join(line_content.left_out)
            light = (
                place,
                "request",
                line_content.format,
                line_content.tenant,
                time,
                prompt is not None,
                has_answer,
                lacks,
            )
            yield (*light, replace(line_content, sample=None), prompt)
    except DejaKVError as error:
        yield place, "failed", str(error), "", math.nan, False, False, "", None, None


def _balanced(requests: Mapping[str, int], tasks: int) -> list[list[str]]:
    """Return tenants in lists of nearly as many requests each."""
    lists: list[tuple[int, int, list[str]]] = [(0, n, []) for n in range(min(tasks, len(requests)))]
    for name, count in sorted(requests.items(), key=lambda item: (-item[1], item[0])):
        # Greedy: the largest tenant left goes to the task with the fewest requests.
        total, number, names = min(lists)
        lists[number] = (total + count, number, [*names, name])
        lists.sort(key=lambda one: one[1])
    return [names for _, _, names in lists]


def _tenant_requests(
    tenants: list[str], last: float, by_time: bool, *blocks: Any
) -> list[tuple[Entry, EstimatedPrompt | None]]:
    """Return the requests of these tenants in the order of their arrival."""
    requests: list[tuple[Entry, EstimatedPrompt | None]] = []
    tenant_names = set(tenants)
    for block in blocks:
        lines = enumerate(
            zip(*(block[name].to_pylist() for name in ("kind", "tenant", "place")), strict=True)
        )
        row_numbers = [
            n
            for n, (kind, name, place) in lines
            if kind == "request" and name in tenant_names and place < last
        ]
        # Only these rows are unpickled: a block has the prompts of every tenant.
        selected_rows = block.take(np.array(row_numbers, np.int64))
        requests += zip(
            selected_rows["entry"].to_pylist(), selected_rows["asked"].to_pylist(), strict=True
        )

    return sorted(
        requests, key=lambda one: ((one[0].time or 0.0) if by_time else 0.0, one[0].place)
    )


def _savings(*task_arguments: Any) -> SavingsCounter:
    savings = SavingsCounter()
    for entry, prompt in _tenant_requests(*task_arguments):
        (
            savings.add_trace(entry)
            if prompt is None
            else savings.add(prompt.prepared.token_ids, entry)
        )

    # A sum has counts alone: the hashes that counting needed would be pickled too.
    return SavingsCounter() + savings


def _texts(*task_arguments: Any) -> set[str]:
    return {
        varying_part(prompt.prepared.request.chunk)
        for _, prompt in _tenant_requests(*task_arguments)
        if prompt is not None
    } - {""}


def _encoded(encoder: TextEncoder, texts: Sequence[str]) -> dict[str, Any]:
    return {text: encoder.encode(text) for text in texts}


def _tally(
    config: SemanticCacheConfig, vectors: Mapping[str, Any] | None, *task_arguments: Any
) -> Counter[str]:
    prompts = [prompt for _, prompt in _tenant_requests(*task_arguments) if prompt is not None]
    encoder = (
        text_encoder("model", embed=vectors.__getitem__, fingerprint="ray")
        if vectors is not None
        else None
    )
    return tally(prompts, config, encoder)

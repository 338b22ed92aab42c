"""Data sets by name, as in `--dataset`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path

from dejakv.datasets.base import Dataset, Sample
from dejakv.errors import DatasetError
from dejakv.models.table import shipped
from dejakv.settings import made_by

WORKLOADS = ("repo", "rag", "sessions")
WORLDS = ("shapes", "docs")
"""The made-up worlds of the bundled models. They come with these, in `dejakv-models`."""
OPTIONS = {"passages": "rag", "order": "rag", "window": "sessions", "compact_tools": "sessions"}
"""The data set of each option."""


@dataclass(frozen=True)
class WorkloadOptions:
    """passages, order: of `rag`; window, compact_tools: of `sessions`. None: the data set's own default. See
    `RagDataset` and `SessionsDataset`."""

    passages: int | None = None
    order: str | None = None
    window: int | None = None
    compact_tools: int | None = None


def open_workload(name: str, path: str | None, seed: int, options: WorkloadOptions) -> Dataset:
    """A workload by one of the names above.

    Raises: DatasetError if `path` cannot be read; ConfigError for a wrong option; MissingExtraError.
    """
    given = {key: value for key, value in vars(options).items() if value is not None}
    if name == "repo":
        from dejakv.datasets.repo import RepoDataset

        return RepoDataset(path, seed)
    if name == "rag":
        from dejakv.datasets.rag import RagDataset

        return RagDataset(path, seed, **{key: given[key] for key in ("passages", "order") if key in given})
    from dejakv.datasets.sessions import SessionsDataset

    return SessionsDataset(path, seed, **{key: given[key] for key in ("window", "compact_tools") if key in given})


_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet")
"""Endings of paths that cannot be ids on the hub."""

KNOWN = (*WORLDS, *WORKLOADS, "gqa", "jsonl", "folder")


@dataclass(frozen=True)
class DatasetOptions:
    """The command line's options of a data set. A factory given as `package.module:factory` gets them as keywords."""

    path: str | None = None
    config: str | None = None
    split: str | None = None
    image_root: str | None = None
    max_samples: int | None = None
    seed: int = 0
    shuffle_seed: int | None = None


def check_name(name: str) -> None:
    """Raises: DatasetError for what is neither the name of a data set nor `package.module:factory`."""
    if name not in KNOWN and ":" not in name:
        raise DatasetError(f"unknown data set {name!r}: choose one of {', '.join(KNOWN)} or package.module:factory")


def open_dataset(
    name: str, options: DatasetOptions, workload: WorkloadOptions | None = None, *, pictures: bool = True
) -> Dataset:
    """A data set by name or `package.module:factory`. `pictures=False`: GQA from the hub comes without its pictures.

    Raises: DatasetError for an unknown name or missing files, ConfigError for a factory that does not import.
    """
    check_name(name)
    if ":" in name:
        return made_by(name, "--dataset", ("__iter__",), **vars(options))
    if name in WORLDS:
        shipped(f"the data set {name}")
        return import_module(f"dejakv_models.{name}").dataset(options.seed, options.max_samples)
    if name in WORKLOADS:
        return open_workload(name, options.path, options.seed, workload or WorkloadOptions())
    if name == "gqa":
        from dejakv.datasets.gqa import DEFAULT_CONFIG, HUB_ID, GqaFiles, GqaHub

        if options.path and Path(options.path).suffix == ".json":
            return GqaFiles(options.path)
        if options.path and Path(options.path).suffix in _FILES and not Path(options.path).exists():
            raise DatasetError(f"no file {options.path!r}: give GQA's questions JSON with --dataset-path")
        if options.path and Path(options.path).is_file():
            raise DatasetError(
                f"--dataset-path {options.path!r} is not in GQA's format, which is one .json file of question id -> record: "
                "give that, or --dataset jsonl for JSON lines"
            )
        return GqaHub(options.config or DEFAULT_CONFIG, options.split or "val", options.path or HUB_ID, pictures)
    if name == "jsonl":
        from dejakv.datasets.files import JsonlDataset

        return JsonlDataset(_required(options.path, "a .jsonl file"), options.image_root)
    from dejakv.datasets.files import FolderDataset

    return FolderDataset(_required(options.path or options.image_root, "a folder of pictures"))


def samples(dataset: Dataset, options: DatasetOptions) -> Iterator[Sample]:
    """The first `max_samples`, after shuffling if a seed is given (which reads the whole data set).

    Raises: DatasetError if the data set yields anything but a `Sample`.
    """
    found = _checked(dataset)
    if options.shuffle_seed is not None:
        every = list(found)
        random.Random(options.shuffle_seed).shuffle(every)
        found = iter(every)
    return islice(found, options.max_samples)


def told(path: str | None, read: int, more: bool) -> list[str]:
    """What was read of a file of one's own, if that is not all of it."""
    if path is None or not more:
        return []
    return [f"read: {read:,} samples of {Path(path).name}, which has more: --max-samples N reads further"]


def begin(found: Iterator[Sample], most: int) -> tuple[tuple[Sample, ...], bool]:
    """The first `most` samples, and whether there are more. A fault behind them is no fault of theirs."""
    first = tuple(islice(found, most))
    try:
        return first, next(found, None) is not None
    except DatasetError:
        return first, True


def _checked(dataset: Dataset) -> Iterator[Sample]:
    for sample in dataset:
        if not isinstance(sample, Sample):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DatasetError(f"the data set yielded a {type(sample).__name__}: yield dejakv.datasets.base.Sample")
        yield sample


def _required(path: str | None, what: str) -> str:
    if not path:
        raise DatasetError(f"this data set needs {what}: give it with --dataset-path")
    return path

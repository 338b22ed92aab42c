"""Data sets by name, as in `--dataset`."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from dejakv.datasets.base import Dataset, Sample
from dejakv.datasets.files import FolderDataset
from dejakv.datasets.gqa import open_gqa
from dejakv.datasets.log import RequestLog
from dejakv.errors import DatasetError
from dejakv.models.table import distribution_folder
from dejakv.settings import make_from_factory

T = TypeVar("T")

WORKLOADS = {"repo": "RepoDataset", "rag": "RagDataset", "sessions": "SessionsDataset"}
"""Generated traffic, each with the class in the module of its name."""
WORLDS = ("shapes", "docs")
"""The made-up worlds of the bundled models. They come with these, in `dejakv-models`."""
OPTIONS = {"passages": "rag", "order": "rag", "window": "sessions", "compact_tools": "sessions"}
"""The data set of each option; its class explains the option."""
KNOWN = (*WORLDS, *WORKLOADS, "gqa", "log", "jsonl", "folder")
"""Names of all data sets; `jsonl` is a former name of `log`."""


@dataclass(frozen=True)
class DatasetOptions:
    """Options of a data set on the command line.

    A factory that is named as `package.module:factory` gets them as keywords.
    """

    path: str | None = None
    config: str | None = None
    split: str | None = None
    image_root: str | None = None
    max_samples: int | None = None
    seed: int = 0
    shuffle_seed: int | None = None


def check_name(name: str) -> None:
    """Raise a DatasetError for what names neither a data set nor `package.module:factory`."""
    if name not in KNOWN and ":" not in name:
        raise DatasetError(
            f"unknown data set {name!r}: choose one of {', '.join(KNOWN)} or package.module:factory"
        )


def open_dataset(
    name: str,
    options: DatasetOptions,
    specific_options: Mapping[str, Any] | None = None,
    *,
    pictures: bool = True,
) -> Dataset:
    """Open a data set by its name or `package.module:factory`.

    Parameters
    ----------
    name : str
        The name.
    options : DatasetOptions
        Options that data sets share.
    specific_options : mapping, optional
        Options of this data set alone (`OPTIONS`); None among them is its own default.
    pictures : bool
        Whether GQA from the hub comes with its pictures.

    Raises
    ------
    DatasetError
        For an unknown name or missing files.
    ConfigError
        For a wrong option or a factory that does not import.
    MissingExtraError
        For a data set that needs a package which is not installed.
    """
    check_name(name)
    # The user's own code: the methods that it must have are checked before a sample is read.
    if ":" in name:
        return make_from_factory(name, "--dataset", ("__iter__",), **vars(options))
    if name in WORLDS:
        distribution_folder(f"the data set {name}")
        return import_module(f"dejakv_models.{name}").dataset(options.seed, options.max_samples)
    if name in WORKLOADS:
        keyword_options = {
            key: value
            for key, value in (specific_options or {}).items()
            if value is not None and OPTIONS[key] == name
        }
        kind = getattr(import_module(f"dejakv.datasets.{name}"), WORKLOADS[name])
        return kind(options.path, options.seed, **keyword_options)

    if name == "gqa":
        return open_gqa(options.path, options.config, options.split, pictures)
    path = options.path or (options.image_root if name == "folder" else None)
    if not path:
        source_kind = "a folder of pictures" if name == "folder" else "a file"
        raise DatasetError(f"this data set needs {source_kind}: give it with --dataset-path")
    if name == "folder":
        return FolderDataset(path)
    return RequestLog(Path(path), Path(options.image_root or Path(path).parent))


def samples(
    dataset: Dataset, max_samples: int | None = None, shuffle_seed: int | None = None
) -> Iterator[Sample]:
    """Yield the first `max_samples`, after shuffling if there is a seed.

    Shuffling reads the whole data set.

    Raises
    ------
    DatasetError
        If the data set yields anything but a `Sample`.
    """
    selection = _checked(dataset)
    if shuffle_seed is not None:
        every = list(selection)
        random.Random(shuffle_seed).shuffle(every)
        selection = iter(every)
    return islice(selection, max_samples)


def unread_note(path: str | None, read: int, more: bool) -> list[str]:
    """Return a sentence on the unread part of a user's file, or none if all of it was read.

    Parameters
    ----------
    path : str or None
        The file; None for a data set without one.
    read : int
        Samples that were read.
    more : bool
        Whether the file has further ones.
    """
    if path is None or not more:
        return []
    return [
        f"read: {read:,} samples of {Path(path).name}, which has more: --max-samples N reads"
        " further"
    ]


def take_first(items: Iterator[T], max_items: int) -> tuple[tuple[T, ...], bool]:
    """Return the first `max_items`, and whether there are more; an error of the next is ignored."""
    first = tuple(islice(items, max_items))
    try:
        # One more is read, only to know whether there is one.
        return first, next(items, None) is not None
    except DatasetError:
        return first, True


def _checked(dataset: Dataset) -> Iterator[Sample]:
    for sample in dataset:
        # A factory is the user's code, and nothing has checked what it yields.
        if not isinstance(sample, Sample):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DatasetError(
                f"the data set yielded a {type(sample).__name__}: yield dejakv.datasets.base.Sample"
            )
        yield sample

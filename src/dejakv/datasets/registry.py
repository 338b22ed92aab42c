"""Data sets by name, as `--dataset` gives them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Dataset, Sample
from dejakv.datasets.workload import WORKLOADS, WorkloadOptions, open_workload
from dejakv.errors import ConfigError, DatasetError

QUESTIONS_A_PICTURE = 13
"""As in GQA, whose balanced validation split asks 132,062 questions about 10,234 pictures."""

DOCUMENT_FACTS = 64
"""About 640 tokens a document: long enough for a prefill to cost more than a look-up."""

KNOWN = ("shapes", "docs", *WORKLOADS, "gqa", "jsonl", "folder")


@dataclass(frozen=True)
class DatasetOptions:
    """What the command line knows about a data set. A factory of one's own is called with these as keywords."""

    path: str | None = None
    config: str | None = None
    split: str | None = None
    image_root: str | None = None
    max_samples: int | None = None
    seed: int = 0
    shuffle_seed: int | None = None


def open_dataset(name: str, options: DatasetOptions, workload: WorkloadOptions | None = None) -> Dataset:
    """A data set by name or `package.module:factory`.

    Raises: DatasetError for an unknown name or missing files, ConfigError for a factory that does not import.
    """
    if ":" in name:
        return factory(name, "--dataset")(**vars(options))
    if name == "shapes":
        from dejakv.datasets.shapes import ShapesDataset

        count = options.max_samples or 320
        return ShapesDataset(seed=options.seed, samples=count, images=max(8, count // QUESTIONS_A_PICTURE))
    if name == "docs":
        from dejakv.datasets.docs import DocsStream

        return DocsStream(seed=options.seed, samples=options.max_samples or 200, facts=DOCUMENT_FACTS)
    if name in WORKLOADS:
        return open_workload(name, options.path, options.seed, workload or WorkloadOptions())
    if name == "gqa":
        from dejakv.datasets.gqa import DEFAULT_CONFIG, HUB_ID, GqaFiles, GqaHub

        if options.path and Path(options.path).suffix == ".json":
            return GqaFiles(options.path, options.image_root)
        return GqaHub(options.config or DEFAULT_CONFIG, options.split or "val", options.path or HUB_ID)
    if name == "jsonl":
        from dejakv.datasets.jsonl import JsonlDataset

        return JsonlDataset(_required(options.path, "a .jsonl file"), options.image_root)
    if name == "folder":
        from dejakv.datasets.folder import FolderDataset

        return FolderDataset(_required(options.path or options.image_root, "a folder of pictures"))
    raise DatasetError(f"unknown data set {name!r}: choose one of {', '.join(KNOWN)} or package.module:factory")


def samples(dataset: Dataset, options: DatasetOptions) -> Iterator[Sample]:
    """The first `max_samples`, after shuffling if a seed is given (which reads the whole data set)."""
    found: Iterator[Sample] = iter(dataset)
    if options.shuffle_seed is not None:
        every = list(found)
        random.Random(options.shuffle_seed).shuffle(every)
        found = iter(every)
    return islice(found, options.max_samples)


def factory(dotted: str, flag: str) -> Callable[..., Any]:
    """What `package.module:factory` names.

    Raises: ConfigError naming the flag, if it does not import or is not callable.
    """
    module, _, attribute = dotted.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag} {dotted!r} does not import ({error}): give package.module:factory") from error
    if not callable(found):
        raise ConfigError(f"{flag} {dotted!r} is not callable: name a function or class")
    return found


def _required(path: str | None, what: str) -> str:
    if not path:
        raise DatasetError(f"this data set needs {what}: give it with --dataset-path")
    return path

"""The samples of a run, with the pictures that they name, and what reads them without a model: its tokenizer.

Pictures are `<imageId>.jpg` or `.png` below `--image-root` and the folders of SEMANTIC_CACHE_IMAGE_ROOT, GQA_IMAGE_ROOT and
LLAVA_IMAGE_ROOT, for the model and the embedding hook alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.datasets.registry import DatasetOptions, WorkloadOptions, open_dataset, samples
from dejakv.engines.open import takes_pictures
from dejakv.errors import DatasetError, InputError, ModelError
from dejakv.experiments.settings import RunSettings
from dejakv.models import RECIPES, fetched, resolve, tokenizer_folder
from dejakv.models.gguf import SUFFIX, load_gguf_tokenizer
from dejakv.vectors.image import image_id, image_roots, pictures_of


def read_samples(settings: RunSettings, beyond: int = 0) -> Iterator[Sample]:
    """The samples of a run, in its order, and up to `beyond` that come behind them. Raises: DatasetError, also for an image root that is no folder."""
    root = settings.cache.image_root
    if root is not None and not Path(root).expanduser().is_dir():
        raise DatasetError(f"--image-root {root!r} is no folder: give the folder of the pictures")
    options = DatasetOptions(
        path=settings.dataset_path,
        config=settings.dataset_config,
        split=settings.split,
        image_root=settings.cache.image_root,
        max_samples=settings.max_samples,
        seed=settings.seed,
        shuffle_seed=settings.shuffle_seed,
    )
    workload = WorkloadOptions(settings.passages, settings.order, settings.window, settings.compact_tools)
    wanted = wants_pictures(settings)
    dataset = open_dataset(settings.dataset, options, workload, pictures=wanted)
    found = samples(dataset, replace(options, max_samples=settings.max_samples + beyond))
    return with_pictures(found, image_roots(options.image_root)) if wanted else found


def wants_pictures(settings: RunSettings) -> bool:
    """Whether the model is to see the pictures that records name. A folder given for a model that reads only text is told."""
    if settings.cache_mode == "shares" or model_is_missing(settings):
        return False
    return bool(settings.cache.image_root) or takes_pictures(settings)


def repeated(samples: Sequence[Sample], times: int) -> tuple[Sample, ...]:
    """The samples, and again from the second round on under ids of their own."""
    return tuple(
        replace(sample, id=f"{sample.id}#{number}") if number > 1 else sample
        for number in range(1, times + 1)
        for sample in samples
    )


def with_pictures(samples: Iterable[Sample], roots: Sequence[Path]) -> Iterator[Sample]:
    """Each sample with the picture that its record names. One whose picture is missing or unreadable stays without; see
    `missing`."""
    for sample in samples:
        try:
            yield replace(sample, media=sample.media or pictures_of(sample, roots))
        except InputError:
            yield sample


def missing(samples: Iterable[Sample]) -> int:
    """Samples that name a picture and have none."""
    return sum(not sample.media and bool(image_id(sample)) for sample in samples)


def model_is_missing(settings: RunSettings) -> bool:
    """Whether the model can be fetched and is not: its tokenizer ships with the package anyway."""
    return any(item.recipe.name == settings.model and item.state != "ready" for item in fetched())


def tokenizer_of(settings: RunSettings) -> Any:
    """The tokenizer of a run's model, without its weights. Raises: ModelError."""
    from transformers import AutoTokenizer

    if settings.model in RECIPES:
        return AutoTokenizer.from_pretrained(tokenizer_folder(settings.model))
    found = resolve(settings.model)
    if isinstance(found, Path) and found.suffix == SUFFIX:
        return load_gguf_tokenizer(found)
    try:
        return AutoTokenizer.from_pretrained(str(found), trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{settings.model!r} has no tokenizer that can be loaded ({error}): give another --model"
        ) from error

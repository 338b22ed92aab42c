"""Pictures that records name by id: `<imageId>.jpg` or `.png` below a folder, for the model and the embedding hook alike.

The folders are `--image-root` and those of the variables SEMANTIC_CACHE_IMAGE_ROOT, GQA_IMAGE_ROOT and LLAVA_IMAGE_ROOT.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dejakv.datasets.base import Sample
from dejakv.encoders.pictures import image_id, pictures_of
from dejakv.errors import InputError


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

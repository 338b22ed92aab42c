"""GQA (Hudson and Manning, 2019, https://cs.stanford.edu/people/dorarad/gqa/): from the hub, or from its own files.

From the hub (`lmms-lab/GQA` through `datasets`), questions are in `<split>_<kind>_instructions` and pictures in
`<split>_<kind>_images`, joined by image id. The original release is one JSON object `{question id: record}` and a folder
of `<imageId>.jpg`, which `--image-root` or an environment variable names.
"""

import json
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.errors import DatasetError, MissingExtraError
from dejakv.request import Media

HUB_ID = "lmms-lab/GQA"
DEFAULT_CONFIG = "val_balanced_instructions"


class GqaFiles:
    """The original JSON file. Its questions name their pictures by `imageId`; a run looks for them."""

    name = "gqa"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise DatasetError(f"no file {str(path)!r}: give GQA's questions JSON with --dataset-path")

    def __iter__(self) -> Iterator[Sample]:
        try:
            records: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"{self.path.name} is not JSON ({error}): give GQA's questions JSON with --dataset-path"
            ) from error
        if not isinstance(records, dict):
            raise DatasetError(f"{self.path.name} is not in GQA's format: give an object of question id -> record")
        for key, record in records.items():
            if not isinstance(record, dict):
                raise DatasetError(
                    f"{self.path.name}: record {key} is not an object: give an object of question id -> record"
                )
            yield sample_of(str(key), record, ())


class GqaHub:
    """`lmms-lab/GQA` from the Hugging Face hub or a local copy of its folder; pictures are read when a question needs them."""

    name = "gqa"

    def __init__(
        self, config: str = DEFAULT_CONFIG, split: str = "val", path: str = HUB_ID, pictures: bool = True
    ) -> None:
        self.config, self.split, self.path, self.pictures = config, split, path, pictures
        if not config.endswith("_instructions"):
            raise DatasetError(f"--dataset-config {config!r} has no questions: give one like {DEFAULT_CONFIG}")

    def __iter__(self) -> Iterator[Sample]:
        questions = self._load(self.config)
        images, rows = None, {}
        if self.pictures:
            from datasets import Image

            images = self._load(self.config.replace("_instructions", "_images")).cast_column(
                "image", Image(decode=False)
            )
            rows = {str(name): row for row, name in enumerate(images["id"])}
        for record in questions:
            media: tuple[Media, ...] = ()
            if images is not None:
                row = rows.get(str(record["imageId"]))
                if row is None:
                    raise DatasetError(
                        f"question {record['id']}: its picture {record['imageId']} is missing from the images configuration of the hub"
                    )
                media = (Media(_bytes_of(images[row]["image"]), "image", str(record["imageId"])),)
            yield sample_of(str(record["id"]), record, media)

    def _load(self, config: str) -> Any:
        try:
            from datasets import load_dataset
        except ImportError:
            raise MissingExtraError("datasets", "hub", "GQA from the hub") from None
        try:
            return load_dataset(self.path, config, split=self.split)
        except Exception as error:
            raise DatasetError(
                f"cannot load {self.path} ({config}, split {self.split}): {error}. Without internet give --dataset-path"
                " with GQA's own JSON and --image-root"
            ) from error


def sample_of(key: str, record: Mapping[str, Any], media: tuple[Media, ...]) -> Sample:
    """One GQA record as a sample."""
    if not isinstance(record.get("question"), str):
        raise DatasetError(f"GQA record {key} has no text field 'question': add it, or remove the record")
    answer = record.get("answer")
    return Sample(key, record["question"], None if answer is None else str(answer), media, fields={"id": key, **record})


def _bytes_of(image: Mapping[str, Any]) -> bytes:
    if image.get("bytes"):
        return bytes(image["bytes"])
    if image.get("path"):
        return Path(image["path"]).read_bytes()
    buffer = BytesIO()
    image["image"].save(buffer, "PNG")
    return buffer.getvalue()

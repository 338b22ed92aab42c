"""GQA (Hudson and Manning, 2019, https://cs.stanford.edu/people/dorarad/gqa/).

It is read from the hub, or from its own files. From the hub (`lmms-lab/GQA` through `datasets`),
questions are in `<split>_<kind>_instructions` and pictures in `<split>_<kind>_images`, joined by
image id. A local copy of that folder is read from its place: the cache of `datasets` knows a copy
by its folder's name alone, and gives the rows of another one with that name. The original release
is one JSON object `{question id: record}` and a folder of `<imageId>.jpg`, which `--image-root` or
an environment variable names.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dejakv.datasets.base import Dataset, Sample
from dejakv.datasets.files import read_json
from dejakv.errors import DatasetError, MissingExtraError
from dejakv.models.loading import without_network
from dejakv.request import Media

HUB_ID = "lmms-lab/GQA"
DEFAULT_CONFIG = "val_balanced_instructions"
_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet")
"""Endings of paths that cannot be ids on the hub."""
_FORM = (
    "give GQA's questions JSON, one object of question id -> record, with --dataset-path, or"
    " --dataset log for JSON lines"
)


def open_gqa(path: str | None, config: str | None, split: str | None, pictures: bool) -> Dataset:
    """Open GQA from a file, or from the hub or a local copy of its folder.

    Parameters
    ----------
    path : str or None
        File of questions, folder of a copy, or id on the hub; None: `HUB_ID`.
    config : str or None
        Configuration on the hub; None: `DEFAULT_CONFIG`.
    split : str or None
        Split on the hub; None: `val`.
    pictures : bool
        Whether questions from the hub come with their pictures.

    Raises
    ------
    DatasetError
        For a file that is missing, and for a configuration without questions.
    """
    if path and (Path(path).is_file() or (Path(path).suffix in _FILES and not Path(path).exists())):
        return GqaFiles(path)
    return GqaHub(config or DEFAULT_CONFIG, split or "val", path or HUB_ID, pictures)


class GqaFiles:
    """Questions of the original JSON file.

    They name their pictures by `imageId`, and a run looks for these.

    Raises
    ------
    DatasetError
        For a path that is no file, and on iteration for a file that is not in GQA's format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise DatasetError(f"no file {str(path)!r}: {_FORM}")

    def __iter__(self) -> Iterator[Sample]:
        records = read_json(self.path, _FORM)
        if not isinstance(records, dict):
            raise DatasetError(f"{self.path.name} is not in GQA's format: {_FORM}")
        for key, record in records.items():
            if not isinstance(record, dict):
                raise DatasetError(f"{self.path.name}: record {key} is not an object: {_FORM}")
            yield sample_of(str(key), record, ())


class GqaHub:
    """`lmms-lab/GQA` from the Hugging Face hub or a local copy of its folder.

    Pictures are read when a question needs them.

    Raises
    ------
    DatasetError
        For a configuration without questions, and on iteration for one that cannot be loaded and
        for a question whose picture is missing.
    MissingExtraError
        On iteration, without the package `datasets`.
    """

    def __init__(self, config: str, split: str, path: str, pictures: bool) -> None:
        self.config, self.split, self.path, self.pictures = config, split, path, pictures
        if not config.endswith("_instructions"):
            raise DatasetError(
                f"--dataset-config {config!r} has no questions: give one like {DEFAULT_CONFIG}"
            )

    def __iter__(self) -> Iterator[Sample]:
        questions = self._load(self.config)
        images, rows = None, {}
        if self.pictures:
            images = self._load(self.config.replace("_instructions", "_images"))
            # Ids alone: the pictures are many, and few questions may be asked.
            rows = {str(name): row for row, name in enumerate(images["id"])}

        for record in questions:
            media: tuple[Media, ...] = ()
            if images is not None:
                name = str(record["imageId"])
                if name not in rows:
                    raise DatasetError(
                        f"question {record['id']}: its picture {name} is missing from the images"
                        " configuration of the hub"
                    )
                image = images[rows[name]]["image"]
                media = (
                    Media(bytes(image["bytes"] or Path(image["path"]).read_bytes()), "image", name),
                )
            yield sample_of(str(record["id"]), record, media)

    def _load(self, config: str) -> Any:
        try:
            from datasets import Image, load_dataset
        except ImportError:
            raise MissingExtraError("datasets", "hub", "GQA from the hub") from None

        try:
            if (folder := Path(self.path).expanduser()).is_dir():
                return ParquetRows(_files(folder, config, self.split))
            without_network()
            dataset: Any = load_dataset(self.path, config, split=self.split)
        except Exception as error:
            raise DatasetError(
                f"cannot load {self.path} ({config}, split {self.split}): {error}. Without internet"
                " give --dataset-path with GQA's own JSON and --image-root"
            ) from error

        # Bytes as they are: a picture is known by their digest, and decoding loses them.
        return (
            dataset.cast_column("image", Image(decode=False))
            if "image" in dataset.column_names
            else dataset
        )


class ParquetRows:
    """Rows of Parquet files as `datasets` gives them, without its cache.

    One group of rows is in memory at a time.
    """

    def __init__(self, files: Sequence[str]) -> None:
        from pyarrow.parquet import ParquetFile

        opened = [ParquetFile(file) for file in files]
        self._groups = [(file, group) for file in opened for group in range(file.num_row_groups)]
        self._ends: list[int] = []

        for file, group in self._groups:
            self._ends.append(
                file.metadata.row_group(group).num_rows + (self._ends[-1] if self._ends else 0)
            )

        self._last: tuple[int, Any] = (-1, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file, group in self._groups:
            yield from file.read_row_group(group).to_pylist()

    def __getitem__(self, key: int | str) -> Any:
        """Return the row of a number, or the values of a column."""
        if isinstance(key, str):
            groups = (file.read_row_group(group, columns=[key]) for file, group in self._groups)
            return [value for table in groups for value in table[key].to_pylist()]

        # The first group that ends behind this row.
        number = bisect_right(self._ends, key)
        if self._last[0] != number:
            file, group = self._groups[number]
            self._last = (number, file.read_row_group(group))

        row = key - (self._ends[number - 1] if number else 0)
        return self._last[1].slice(row, 1).to_pylist()[0]


def _files(folder: Path, config: str, split: str) -> Sequence[str]:
    """Return the Parquet files of a configuration, by the folder's README or by their names.

    Raises
    ------
    DatasetError
        For files of another kind.
    """
    from datasets import load_dataset_builder

    # An empty cache: what a shared one has under this name may be of another folder.
    with TemporaryDirectory() as empty:
        files = load_dataset_builder(str(folder), config, cache_dir=empty).config.data_files or {}
    split_files = [str(file) for file in files.get(split, ())]
    if not split_files or not all(file.endswith(".parquet") for file in split_files):
        raise DatasetError(
            f"it has {', '.join(files) or 'no split'} and not {split}, or files that are not"
            " Parquet"
        )

    return split_files


def sample_of(key: str, record: Mapping[str, Any], media: tuple[Media, ...]) -> Sample:
    """Return one GQA record as a sample; a DatasetError tells that it has no question."""
    if not isinstance(record.get("question"), str):
        raise DatasetError(
            f"GQA record {key} has no text field 'question': add it, or remove the record"
        )
    answer = record.get("answer")
    return Sample(
        key,
        record["question"],
        None if answer is None else str(answer),
        media,
        fields={"id": key, **record},
    )

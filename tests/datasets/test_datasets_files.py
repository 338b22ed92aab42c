import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dejakv.datasets.base import Sample
from dejakv.datasets.registry import DatasetOptions, open_dataset, samples
from dejakv.errors import ConfigError, DatasetError


def picture(color: str = "red") -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (8, 8), color).save(buffer, "PNG")
    return buffer.getvalue()


def read(name: str, **options: Any) -> list[Sample]:
    given = DatasetOptions(**options)
    return list(samples(open_dataset(name, given), given.max_samples, given.shuffle_seed))


@pytest.mark.parametrize("name", ["log", "jsonl"])
def test_json_lines_have_pictures_below_their_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    lines = [{"question": "What?", "image": "a.png", "answer": 3, "id": "x", "topic": "t"}, {"question": "And?"}]
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    one, two = read(name, path=str(file))
    assert (one.id, one.question, one.answer, one.fields["topic"]) == ("x", "What?", "3", "t")
    assert one.media[0].data == picture()
    assert (two.id, two.answer, two.media) == ("2", None, ())


def test_folder_asks_every_picture_or_its_own_questions(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "b.png").write_bytes(picture("blue"))
    (tmp_path / "b.txt").write_text("What color?\tblue\n\nHow many?\n")
    found = read("folder", path=str(tmp_path))
    assert [(s.fields["imageId"], s.question, s.answer) for s in found[-2:]] == [
        ("b", "What color?", "blue"),
        ("b", "How many?", None),
    ]
    assert len(found) == 4


def gqa_record(image: str) -> dict[str, Any]:
    return {
        "imageId": image, "question": "Is it red?", "answer": "yes", "fullAnswer": "Yes, it is red.",
        "isBalanced": True, "groups": {"global": None, "local": "10-red"}, "entailed": [], "equivalent": ["1"],
        "types": {"structural": "verify"}, "semantic": [], "semanticStr": "select: it->verify color: red",
    }  # fmt: skip


def test_gqa_files(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text(json.dumps({"1": gqa_record("77")}))
    (one,) = read("gqa", path=str(tmp_path / "q.json"))
    assert (one.id, one.answer, one.fields["semanticStr"]) == ("1", "yes", "select: it->verify color: red")
    assert one.fields["imageId"] == "77"
    for text, says in (("[]", "GQA's format"), ('{"1": 5}', "record 1 is not an object"), ("[" * 100_000, "not JSON")):
        (tmp_path / "q.json").write_text(text)
        with pytest.raises(DatasetError, match=says):
            read("gqa", path=str(tmp_path / "q.json"))


def test_a_configuration_of_pictures_has_no_questions() -> None:
    with pytest.raises(DatasetError, match="no questions"):
        read("gqa", config="val_balanced_images")


def test_a_factory_of_ones_own_and_shuffling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mydata.py").write_text(
        "from dejakv.datasets.base import Sample\n"
        "class Mine:\n    name = 'mine'\n    def __iter__(self):\n"
        "        return iter([Sample(str(i), 'q') for i in range(20)])\n"
        "def make(**options):\n    return Mine()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [s.id for s in read("mydata:make", max_samples=3)] == ["0", "1", "2"]
    shuffled = [s.id for s in read("mydata:make", shuffle_seed=1)]
    assert sorted(shuffled, key=int) == [str(i) for i in range(20)] != shuffled
    assert shuffled == [s.id for s in read("mydata:make", shuffle_seed=1)]
    with pytest.raises(ConfigError, match="does not import"):
        read("mydata:nothing")

"""Embedding hooks and the pictures they look at."""

import sys
import types
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError, InputError, ModelError
from dejakv.pictures import decode_picture
from dejakv.request import Media, Request
from dejakv.vectors.hooks import EmbeddingHook, make_hook
from dejakv.vectors.image import TowerEncoder, image_encoder, image_roots, pictures_of


def png(shade: int) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


class Engine:
    """An engine that embeds: text by length, pictures by their first pixel."""

    epoch = "epoch"

    def __init__(self) -> None:
        self.partitions: list[str] = []

    def embed_text(self, text: str) -> np.ndarray:
        return np.array([len(text), 1.0, 0.0], np.float32)

    def embed_image(self, media: Media, partition: str = "default") -> np.ndarray:
        self.partitions.append(partition)
        return np.array([float(decode_picture(media).getpixel((0, 0))[0]), 1.0], np.float32)


def config(hook: str = "prompt_vision", layers: tuple[str, ...] = ("prompt:auto", "vision:auto"), **more: Any) -> Any:
    return SemanticCacheConfig(index_encoder="model", embedding_layers=layers, embedding_hook=hook, **more)


def request(chunk: str = "Where?", media: tuple[Media, ...] = (), **metadata: Any) -> Request:
    return Request("r", "prompt", chunk, media=media, partition="tenant", metadata=metadata)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "n161313.jpg").write_bytes(png(10))
    (folder / "7.png").write_bytes(png(20))
    (folder / "broken.png").write_bytes(b"no picture")
    (tmp_path / "secret.png").write_bytes(png(99))
    return folder


def test_prompt_and_vision_vectors(root: Path) -> None:
    engine = Engine()
    hook = make_hook("prompt_vision", config(), engine)
    vectors = hook(request(media=(Media(png(5)),)))
    assert sorted(vectors) == ["prompt", "vision"]
    assert vectors["vision"].tolist() == pytest.approx([5 / 26**0.5, 1 / 26**0.5])
    assert hook.counts == {"prompt: ok": 1, "vision: ok": 1}
    assert engine.partitions == ["tenant"]


@pytest.mark.parametrize("variable", ["SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT", None])
@pytest.mark.parametrize("field", ["image_id", "imageId"])
def test_pictures_by_image_id(root: Path, variable: str | None, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable:
        monkeypatch.setenv(variable, str(root))
    roots = image_roots(None if variable else str(root))
    assert pictures_of(request(**{field: "n161313"}), roots)[0].data == png(10)
    assert pictures_of(request(**{field: 7}), roots)[0].data == png(20)
    assert pictures_of(request(**{field: "7.png"}), roots)[0].data == png(20)
    assert pictures_of(request(), roots) == ()


@pytest.mark.parametrize("image_id", ["missing", "broken", "../secret", "/etc/passwd", "..", "a\0b", "x" * 5000])
def test_a_picture_that_cannot_be_had_is_a_counted_skip(root: Path, image_id: str) -> None:
    with pytest.raises(InputError):
        pictures_of(request(image_id=image_id), [root])
    hook = make_hook("prompt_vision", config(image_root=str(root)), Engine())
    assert list(hook(request(image_id=image_id))) == ["prompt"]
    assert hook.counts == {"prompt: ok": 1, "vision: skip (InputError)": 1}


def test_a_link_out_of_the_root_is_not_followed(root: Path) -> None:
    (root / "link.png").symlink_to(root.parent / "secret.png")
    with pytest.raises(InputError, match="no file below"):
        pictures_of(request(image_id="link"), [root])


def test_without_roots_the_message_says_which_to_set(root: Path) -> None:
    with pytest.raises(InputError, match="GQA_IMAGE_ROOT"):
        pictures_of(request(image_id="7"), image_roots())


def test_a_request_without_picture_has_no_vision_vector_and_is_no_skip(root: Path) -> None:
    hook = make_hook("prompt_vision", config(), Engine())
    assert list(hook(request())) == ["prompt"]
    assert hook.counts == {"prompt: ok": 1}


def test_own_hooks_by_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(llm: Any, sample: Request) -> Mapping[str, Any]:
        return {"mine": [1 / (len(sample.chunk) - 3), llm.embed_text("x")[0]], "other": None}

    module: Any = types.ModuleType("my_hooks")
    module.mine, module.nothing, module.number = mine, lambda: 3, 3
    monkeypatch.setitem(sys.modules, "my_hooks", module)
    hook = make_hook("my_hooks:mine", config("my_hooks:mine", ("mine:2",)), Engine())
    assert hook(request("four"))["mine"].tolist() == [1.0, 1.0]
    assert hook(request("bad")) == {}
    assert hook.counts == {"mine: ok": 1, "hook: skip (ZeroDivisionError)": 1}
    for name, says in (("nothing", "no __call__"), ("number", "callable")):
        with pytest.raises(ConfigError, match=says):
            make_hook(f"my_hooks:{name}", config(f"my_hooks:{name}", ("mine:2",)), Engine())


def test_unknown_hooks_and_layers_nobody_makes() -> None:
    with pytest.raises(ConfigError, match="prompt_vision"):
        make_hook("audio", config("audio"), Engine())
    with pytest.raises(ConfigError, match="'vision'"):
        make_hook("prompt", config("prompt"), Engine())
    with pytest.raises(ConfigError, match="'prompt'"):
        make_hook("none", config("none"), Engine())
    assert make_hook("none", config("none", ()), Engine())(request()) == {}


def test_torch_rows_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    hook = EmbeddingHook({"x": lambda *, llm, sample: {"x": torch.ones(2, requires_grad=True).bfloat16()}}, None, "f")
    assert hook(request())["x"].tolist() == [1.0, 1.0]


def test_the_tower_stands_in_where_clip_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ModelError("cannot be loaded")

    monkeypatch.setattr("dejakv.vectors.image.load_sentence_transformer", fail)
    assert isinstance(image_encoder(Engine()), TowerEncoder)
    with pytest.raises(ConfigError, match="vision layer has no encoder"):
        image_encoder(None)


def test_clip_is_used_where_it_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    class Clip(torch.nn.Module):
        def encode(self, pictures: list[Any], **_: Any) -> np.ndarray:
            return np.stack([np.asarray(p, np.float32).mean(axis=(0, 1)) + 1 for p in pictures])

    monkeypatch.setattr("dejakv.vectors.image.load_sentence_transformer", lambda *_: Clip())
    encoder = image_encoder(Engine())
    assert not isinstance(encoder, TowerEncoder)
    row = encoder.encode(Media(png(50)))
    assert row.tolist() == pytest.approx((np.array([51, 1, 1]) / np.linalg.norm([51, 1, 1])).tolist())
    with pytest.raises(InputError, match="readable image"):
        encoder.encode(Media(b"no"))
    assert isinstance(image_encoder(Engine(), prefer_clip=False), TowerEncoder)

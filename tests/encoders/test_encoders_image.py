"""The encoder of the layer `vision` by `--image-encoder`: a folder with a CLIP model, or the served model's tower."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError, ModelError
from dejakv.request import Request
from dejakv.vectors.hooks import make_hook
from dejakv.vectors.image import TowerEncoder, image_encoder
from dejakv_models.shapes import ShapesDataset


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP model with random weights and 512 numbers a picture, as sentence-transformers saves one."""
    pytest.importorskip("sentence_transformers", reason="the extra `embed` brings it")
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    inner = folder / "0_CLIPModel"
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**small, "vocab_size": 8},
        vision_config={**small, "image_size": 32, "patch_size": 16},
        projection_dim=512,
    )
    CLIPModel(config).save_pretrained(inner)
    words = {"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2, "a": 3}
    tokenizer = CLIPTokenizer(vocab=words, merges=[])
    CLIPProcessor(CLIPImageProcessor(size=32, crop_size=32), tokenizer).save_pretrained(inner)
    module = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    (folder / "modules.json").write_text(json.dumps([module]))
    return folder


def asked() -> list[Request]:
    samples = list(ShapesDataset(seed=0, samples=6, images=8))
    return [Request(sample.id, "p", "c", sample.media) for sample in samples]


@pytest.mark.filterwarnings("ignore:Importing from:DeprecationWarning")
def test_a_folder_of_clip(clip: Path) -> None:
    layers = {"embedding_layers": ("vision:512:0.82",), "embedding_hook": "vision"}
    hook = make_hook("vision", SemanticCacheConfig(image_encoder=str(clip), **layers))  # type: ignore[arg-type]
    rows = [hook(request)["vision"] for request in asked()]
    assert all(row.shape == (512,) for row in rows)
    assert np.allclose([np.linalg.norm(row) for row in rows], 1, atol=1e-5)
    assert any(not np.allclose(rows[0], row) for row in rows[1:])
    assert hook.counts["vision: ok"] == 6


class Engine:
    epoch = "e"

    def embed_image(self, media: Any) -> np.ndarray:
        return np.ones(3)


def test_the_tower_when_it_is_named() -> None:
    assert isinstance(image_encoder(Engine(), name="model"), TowerEncoder)
    with pytest.raises(ConfigError, match="has no vision tower"):
        image_encoder(None, name="model")


def test_a_named_encoder_is_used_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--image-encoder model"):
        image_encoder(Engine(), name=str(tmp_path))

"""An encoder of texts is loaded where a level needs it and nowhere else; where it cannot be loaded, one line says what to do."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.services import python

from dejakv import SemanticCacheConfig

NO_PACKAGE = """
import sys
sys.modules["sentence_transformers"] = None  # an import of it fails, as where it is not installed
"""
USE = """
import dejakv
from dejakv import SemanticCacheConfig
from dejakv.build import build_cache
from dejakv.engines.transformers import TransformersEngine
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling

engine = TransformersEngine.from_pretrained("docs-lm")
text = "<s> Ann lives in Paris. Bob lives in Rome. <q> Where does Bob live? <a>"
inputs = engine.tokenizer(text, return_tensors="pt", add_special_tokens=False)
for reuse in ("exact", "blend", "adopt"):
    config = SemanticCacheConfig(reuse=reuse)
    with_cache = Pipeline(engine, build_cache(config, engine, background=False))
    for number in range(2):
        print(with_cache.answer(Request(str(number), text, text, sampling=Sampling(2))).record.method)
    with_cache.cache.close()
    with dejakv.attach(engine.model, engine.tokenizer, config) as cache:
        print(len(engine.model.generate(**inputs, max_new_tokens=2)))
"""


@pytest.mark.parametrize("before", [NO_PACKAGE, ""], ids=["no package", "no network"])
def test_exact_reuse_and_copied_text_need_no_encoder_and_one_that_is_missing_is_one_line(
    before: str, tmp_path: Path
) -> None:
    """In a process of its own without a model of the hub, and without a network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = python("-c", before + USE, environment=environment)
    assert done.stdout.split() == ["none", "exact", "1"] * 2, done.stderr
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if "Error: " in line]
    assert lines[-1:] == errors, done.stderr
    assert len(lines) < 30, "a traceback of DejaKV's own frames, and none of the download"
    assert 'index_encoder="model" (--index-encoder model)' in errors[0]
    assert ("(extra embed)" in errors[0]) == bool(before)
    assert len(errors[0]) < 600


@pytest.mark.parametrize(
    "settings",
    [
        {"reuse": "adopt"},
        {"reuse": "blend", "copied_text": False},
        {"reuse": "blend", "semantic_text": True},
        {"reuse": "exact", "index_encoder": "model"},
    ],
    ids=["adopt", "without copied text", "asked for", "an encoder named"],
)
def test_settings_that_compare_texts_have_the_level(settings: dict[str, Any]) -> None:
    assert SemanticCacheConfig(**settings).semantic_text is True
    assert SemanticCacheConfig(**{**settings, "semantic_text": False}).semantic_text is False

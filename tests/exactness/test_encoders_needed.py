"""An encoder of texts is loaded where a level needs it and nowhere else; where it cannot be loaded, one line says what to do."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dejakv import SemanticCacheConfig
from dejakv.build import build_cache
from dejakv.errors import MissingExtraError

NO_PACKAGE = """
import sys
sys.modules["sentence_transformers"] = None  # an import of it fails, as where it is not installed
"""
USE = """
import sys
import dejakv
from dejakv import SemanticCacheConfig
from dejakv.build import build_cache
from dejakv.engines.transformers import TransformersEngine
from dejakv.models import load
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling

config = SemanticCacheConfig(**eval(sys.argv[1]))
model, tokenizer = load("docs-lm")
text = "<s> Ann lives in Paris. Bob lives in Rome. <q> Where does Bob live? <a>"
inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
with dejakv.attach(model, tokenizer, config) as cache:
    print(len(model.generate(**inputs, max_new_tokens=2)))
engine = TransformersEngine.from_pretrained("docs-lm")
with_cache = Pipeline(engine, build_cache(config, engine, background=False))
for number in range(2):
    print(with_cache.answer(Request(str(number), text, text, sampling=Sampling(2))).record.method)
with_cache.cache.close()
"""


def run(settings: dict[str, Any], folder: Path, before: str = "") -> "subprocess.CompletedProcess[str]":
    """A process of its own without a model of the hub, and without a network."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "PYTHONWARNINGS": "ignore"}
    program = textwrap.dedent(before + USE)
    return subprocess.run(
        [sys.executable, "-c", program, repr(settings)],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("before", [NO_PACKAGE, ""], ids=["no package", "no network"])
@pytest.mark.parametrize("settings", [{"reuse": "exact"}, {"reuse": "blend"}], ids=["exact", "blend"])
def test_exact_reuse_and_copied_text_need_no_encoder(settings: dict[str, Any], before: str, tmp_path: Path) -> None:
    done = run(settings, tmp_path, before)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "none", "exact"]


@pytest.mark.parametrize("before", [NO_PACKAGE, ""], ids=["no package", "no network"])
def test_an_encoder_that_is_needed_and_missing_is_one_line_with_the_remedies(before: str, tmp_path: Path) -> None:
    done = run({"reuse": "adopt"}, tmp_path, before)
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if "Error: " in line]
    assert len(errors) == 1, done.stderr
    assert lines[-1] == errors[0], done.stderr
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


def test_the_message_in_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r"\(extra embed\).*index_encoder=\"model\" \(--index-encoder model\)"):
        build_cache(SemanticCacheConfig(reuse="adopt"))

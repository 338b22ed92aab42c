"""From settings to parts."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dejakv.build import build_cache, build_guards, build_levels
from dejakv.config import SemanticCacheConfig
from dejakv.decide.guards.base import Guard
from dejakv.decide.guards.lexical import LexicalGuard
from dejakv.decide.levels.latent import EmbeddingCache
from dejakv.engines.base import NO_STATE, Completion, Prepared
from dejakv.errors import ConfigError, ModelError
from dejakv.request import Request

PLAIN = SemanticCacheConfig(index_encoder="model")


def prepared(text: str) -> Prepared:
    return Prepared(Request("r", text, text), tuple(map(ord, text)), epoch="e")


class Engine:
    epoch = "e"

    def embed_text(self, text: str) -> Any:
        return np.array([len(text), 1.0], np.float32)


def names(config: SemanticCacheConfig) -> tuple[list[str], list[str]]:
    levels = build_levels(config, Engine())
    return [level.name for level in levels], [guard.name for guard in build_guards(config, levels)]


def test_levels_in_the_order_of_cost_and_guards_in_the_order_of_doubt() -> None:
    config = replace(PLAIN, embedding_layers=("prompt:2",), embedding_hook="prompt")
    assert names(config) == (
        ["exact_text", "embedding", "semantic_text"],
        ["threshold", "media", "context", "lexical"],
    )


def test_similar_media_ask_the_vision_layer() -> None:
    config = replace(PLAIN, media="similar", embedding_layers=("vision:2:0.9",), embedding_hook="vision")
    level = EmbeddingCache(config.embedding_layers)
    assert [guard.name for guard in build_guards(config, [level])] == [
        "threshold",
        "vision",
        "context",
        "lexical",
    ]


def test_a_level_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "class Level:\n    name = 'mine'\n    status_names = ('mine',)\n    def __init__(self, config): self.config = config\n"
        "    def add(self, donor, query): ...\n    def remove(self, donor): ...\n"
        "    def __len__(self): return 0\n    def search(self, query): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert names(replace(PLAIN, levels=("mine:Level",)))[0] == ["exact_text", "semantic_text", "mine"]
    with pytest.raises(ConfigError, match="--level"):
        names(replace(PLAIN, levels=("mine:Nothing",)))


def test_the_models_embeddings_need_a_model() -> None:
    with pytest.raises(ModelError, match="--index-encoder"):
        build_cache(PLAIN, None)


def test_layers_without_a_hook_name_the_remedy() -> None:
    with pytest.raises(ConfigError, match="--embedding-hook"):
        build_cache(replace(PLAIN, embedding_layers=("prompt:2",)), Engine())


@pytest.mark.parametrize(("guards", "method"), [([], "none"), ([LexicalGuard({"vehicle": "car"})], "adopt")])
def test_a_guard_takes_the_place_of_the_default_guard_of_its_name(guards: list[Guard], method: str) -> None:
    config = replace(PLAIN, reuse="adopt", similarity_threshold=-1.0, min_gain=0, exact_prefix=False)
    with closing(build_cache(config, Engine(), guards=guards, background=False)) as cache:
        donor, asked = (prepared(f"What color is the {noun}?") for noun in ("vehicle", "car"))
        decision = cache.find(donor)
        assert cache.keep(donor, decision, decision.plan, Completion("", (), 1, 0, capture=lambda: NO_STATE))
        assert cache.find(asked).plan.method == method

from pathlib import Path
from typing import Any

import pytest

from dejakv.blend.settings import QUALITIES
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.experiments.settings import preset, preset_names, settings_from


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_makes_settings(name: str) -> None:
    settings = settings_from(name, {}, {})
    run, cache = preset(name)
    assert settings.model == run["model"]
    assert all(hasattr(settings.cache, key) for key in cache)


def test_flags_win_over_the_preset() -> None:
    settings = settings_from("internvl3.5-2b", {"max_samples": 5, "model": None}, {"similarity_threshold": 0.0})
    assert settings.max_samples == 5
    assert settings.model == "OpenGVLab/InternVL3_5-2B-Instruct"
    assert settings.trust_remote_code
    assert settings.cache.similarity_threshold == 0.0
    assert settings.cache.embedding_layers == ("prompt:384:0.8", "vision:512:0.82")


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"shapes.*opt-125m"):
        settings_from("nope", {}, {})


def test_a_folder_for_encoder_outputs_switches_them_on(tmp_path: Path) -> None:
    given = {"fusion_cache_dir": str(tmp_path)}
    assert settings_from("shapes", {}, given).cache.enable_fusion_cache
    assert not settings_from("shapes", {}, {**given, "enable_fusion_cache": False}).cache.enable_fusion_cache
    assert SemanticCacheConfig(fusion_cache_dir=str(tmp_path)).enable_fusion_cache
    assert SemanticCacheConfig().enable_fusion_cache is False


@pytest.mark.parametrize(
    ("run", "cache", "why"),
    [
        ({}, {"similarity_threshold": 0.8}, "--similarity-threshold"),
        ({}, {"embedding_layers": ["prompt:384:0.8"]}, "--embedding-layer"),
        ({"chunk_source": "semantic"}, {}, "--chunk-source semantic"),
    ],
)
def test_what_asks_for_similar_prompts_implies_adopt_and_says_so(
    run: dict[str, Any], cache: dict[str, Any], why: str
) -> None:
    settings = settings_from(None, run, cache)
    assert settings.cache.reuse == "adopt"
    assert [line.startswith(f"{why} asks for similar prompts") for line in settings.implied] == [True]
    told = settings_from(None, run, {**cache, "reuse": "exact"})
    assert (told.cache.reuse, told.implied) == ("exact", ())


def test_without_such_a_setting_reuse_stays_exact() -> None:
    for source in ("question", "prompt"):
        settings = settings_from(None, {"chunk_source": source}, {"max_bytes": 1000})
        assert (settings.cache.reuse, settings.implied) == ("exact", ())


def test_a_blend_is_as_good_as_its_quality_says_unless_told_otherwise() -> None:
    assert SemanticCacheConfig().blend == QUALITIES["default"]
    for name, quality in QUALITIES.items():
        assert SemanticCacheConfig(blend_quality=name).blend == quality
        own = SemanticCacheConfig(blend_quality=name, blend_selector="similarity", blend_share=0.0)
        assert (own.blend.selector, own.blend.share) == ("similarity", 0.0)
        assert SemanticCacheConfig(blend_quality=name, blend_share=0.5).blend.selector == quality.selector

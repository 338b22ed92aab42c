"""Every class of settings refuses what does not fit its annotations, by a message that names field, value and remedy."""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripts.reference_pages import FOLDER, PAGES

from dejakv.blend.prune import PruneConfig
from dejakv.blend.settings import BlendConfig
from dejakv.build import build_cache
from dejakv.config import FORMER, REMOVED_SETTINGS, SemanticCacheConfig
from dejakv.engines.vllm.settings import ConnectorSettings, EncoderSettings
from dejakv.errors import ConfigError
from dejakv.experiments.settings import RunSettings, read_set, split_settings
from dejakv.server.settings import ServerSettings
from dejakv.settings import AnyPath, Folder, Share, description, from_mapping, strict_dataclass

CLASSES = (SemanticCacheConfig, RunSettings, ConnectorSettings, ServerSettings, BlendConfig, PruneConfig)
NUMBERS = [-1, 0, 1, 2, 2**63, 2**70, 10**400, 10**5000, 1.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")]
TEXTS = ["", "x", "nan", "\ud800", "\0", "a\0b", "../..", "/dev/null", "a" * 5000, "/".join(["a"] * 4000), "vision:1"]
OTHERS = [None, True, False, [], ["a"], ("a:b",), ({},), {}, {1: 2}, b"x", object(), Ellipsis, float, Path("/"), [[[]]]]
JUNK = st.sampled_from([*NUMBERS, *TEXTS, *OTHERS]) | st.text() | st.integers() | st.floats() | st.lists(st.text())
FIELDS = [(cls, item.name) for cls in CLASSES for item in fields(cls)]


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the folders that junk names in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("junk"))
        yield


def outcome(make: Callable[[], Any]) -> tuple[Any, str]:
    """What was made, or the text of the only error there may be."""
    try:
        return make(), ""
    except ConfigError as error:
        return None, str(error)


@settings(deadline=None)
@given(st.sampled_from(FIELDS), JUNK)
@example((BlendConfig, "map"), 10**5000)
def test_a_field_of_junk_is_refused_or_gives_settings_that_work(field: tuple[Any, str], value: Any) -> None:
    cls, name = field
    made, error = outcome(lambda: from_mapping(cls, {name: value}))
    if made is None:
        assert len(error) < 1000
        assert name in error.replace("-", "_")
        return
    kept, default = getattr(made, name), getattr(cls(), name)
    assert value is None or kept == (
        tuple(value) if isinstance(value, list) else value
    )  # None may be decided by others
    if default is not None and kept is not None:
        assert type(kept) is type(default) or (isinstance(default, float) and type(kept) is int)
    if isinstance(kept, int | float):
        assert math.isfinite(kept)
        assert abs(kept) < 2**63
    assert replace(made) == made


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([item.name for item in fields(SemanticCacheConfig)]), JUNK, max_size=4))
def test_a_config_of_junk_is_refused_or_builds_a_cache(values: dict[str, Any]) -> None:
    plain = {"semantic_text": False, **values, "store": None, "cache_dir": None}  # any text names a folder
    if plain["semantic_text"] is True or plain["semantic_text"] is None:
        plain["semantic_text"] = False  # its encoder is another package's
    cache, error = outcome(lambda: build_cache(SemanticCacheConfig.from_dict(plain), background=False))
    assert cache is not None or len(error) > 10


@settings(deadline=None)
@given(st.sampled_from([None, 1, "x", [], [("reuse", "exact")], {1: 2}, {None: 1}, {"\ud800": 1}, {"reusee": "exact"}]))
def test_what_are_no_names_and_values_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="the cache's settings"):
        SemanticCacheConfig.from_dict(values)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"exact_text": 1}, "exact_text=1 is neither true nor false"),
        ({"chunk_window": True}, "chunk_window=True is no whole number"),
        ({"min_gain": 1.0}, "min_gain=1.0 is no whole number"),
        ({"costs": [1.0, 2.0]}, "are 2 constants: give four"),
        ({"costs": [1.0, 2.0, 3.0, -4.0]}, "holds -4.0, which is negative"),
        ({"costs": 1.0}, "costs=1.0 is no list"),
        ({"similarity_threshold": float("nan")}, "similarity_threshold=nan is not finite"),
        ({"max_bytes": 2**63}, "max_bytes=9223372036854775808 is too large"),
        ({"embedding_layers": "prompt:4"}, "embedding_layers='prompt:4' is no list"),
        ({"embedding_layers": ["prompt:4", 5]}, "holds 5, which is no text"),
        ({"media": "similar"}, "vision:DIM:THRESHOLD"),
        ({"cache_dir": ""}, "store='' is empty"),
        ({"store": "a" * 5000}, "File name too long"),
        ({"store": "x", "cache_dir": "y"}, "cache_dir is the former name of store"),
        ({"store": "x", "compress": True}, "compress=True is of a bucket, and store='x' is none"),
        ({"store": "x", "disk_dir": "y"}, "disk_dir='y' is of a bucket, and store='x' is none"),
        ({"store": "s3://b/c", "feed": "http://h"}, "feed='http://h' is no address of a feed: give redis://"),
        ({"store": "x", "feed": "redis://:secret@h/0"}, "feed='redis://...@h/0' is of a bucket"),
        ({"store": "/dev/null/x"}, "Not a directory"),
        ({"cache_dir": 5}, "store=5 is no text"),
        ({"index_encoder": "a\0b"}, "contains a NUL"),
        ({"index_encoder": "\ud800"}, "no valid Unicode"),
        ({"policy": ["lru"]}, r"policy=\('lru'\) is unknown: choose one of lru, lfu"),
    ],
)
def test_the_message_says_what_is_wrong_and_what_to_give(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SemanticCacheConfig.from_dict(setting)


def test_run_settings_are_named_as_flags() -> None:
    with pytest.raises(ConfigError, match="--max-samples='ten' is no whole number"):
        RunSettings(max_samples="ten")  # type: ignore[arg-type]


@strict_dataclass()
class Own:
    share: Share = 0.5
    mode: Literal["a", "b"] = "a"
    file: AnyPath | None = None
    folder: Folder | None = None
    names: tuple[str, ...] = ()


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert Own(file=str(tmp_path / "file"), folder=str(tmp_path), names=("x",)).share == 0.5
    for wrong in ({"share": 1.1}, {"mode": "c"}, {"folder": str(tmp_path / "file")}, {"names": ("\0",)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            from_mapping(Own, wrong)


@pytest.mark.parametrize("name", PAGES)
def test_pages_made_from_the_code_are_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run python -m scripts.reference_pages"


@pytest.mark.parametrize("cls", [SemanticCacheConfig, RunSettings, ConnectorSettings, EncoderSettings, ServerSettings])
def test_every_setting_is_documented(cls: Any) -> None:
    assert [item.name for item in fields(cls) if not description(cls, item.name)] == []


def test_the_parts_of_a_cache_share_no_name_and_the_connectors_defaults_differ_where_it_says_so() -> None:
    own = [
        name
        for part in SemanticCacheConfig.__mro__
        for name in vars(part).get("__annotations__", {})
        if name not in FORMER
    ]
    assert len(own) == len(set(own)) == len(fields(SemanticCacheConfig))
    shared = [item for item in fields(ConnectorSettings) if item.name in own]
    other = {item.name for item in shared if item.default != getattr(SemanticCacheConfig, item.name)}
    assert other == {"min_tokens"}


def test_a_setting_that_left_names_what_took_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED_SETTINGS, "old_name", "give blend_share")
    for make in (SemanticCacheConfig.from_dict, ConnectorSettings.from_extra):
        with pytest.raises(ConfigError, match="old_name is no setting any more: give blend_share"):
            make({"old_name": 1})
    with pytest.raises(ConfigError, match="old_name is no setting any more: give blend_share"):
        split_settings({"old-name": 1}, "a sweep")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("blend.share=.2", "blend_share", 0.2),
        ("keep.ttl=60", "ttl", 60.0),
        ("find.embedding_layers=a:1,b:2", "embedding_layers", ("a:1", "b:2")),
        ('quotas=["a=1", "b=2"]', "quotas", ("a=1", "b=2")),
        ("image-encoder=none", "image_encoder", None),
        ("free_order=false", "free_order", False),
        ("max_samples=ten", "max_samples", "ten"),
    ],
)
def test_values_from_a_command_line(text: str, name: str, value: Any) -> None:
    assert read_set(text) == (name, value)

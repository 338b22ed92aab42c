"""`dejakv.open_store`: one name for a store of any kind."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import dejakv
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError
from dejakv.store.open import find_stores
from dejakv.testing import make_stored_state


@pytest.mark.parametrize("where", [None, "memory:", "memory://"])
def test_a_store_in_memory(where: str | None) -> None:
    store = dejakv.open_store(where, max_entries=1, policy="lfu")
    assert store.put(make_stored_state(1))
    assert store.put(make_stored_state(2))
    assert store.stats().entries == 1


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@cache.example:6379/0",
        "http://nowhere",
        "s3://",
        "s3://key:secret@bucket/cache",
        "s3://b/c?secret",
        "://",
        "memory://x",
        "memory:x",
        "s3:/bucket/cache",
        "s3:bucket/cache",
        "s3//bucket/cache",
        "S3://bucket/cache",
        "S3:/bucket/cache",
        "s3a:/bucket/cache",
        "gs:/bucket",
        "az:container",
        "file:/var/cache",
        "redis:6379",
        str(Path("gs://bucket/cache")),
    ],
)
@pytest.mark.parametrize(
    "asked",
    [
        lambda url: dejakv.open_store(url),
        lambda url: dejakv.SemanticCacheConfig(store=url),
        lambda url: dejakv.SemanticCacheConfig(cache_dir=url),
        lambda url: dejakv.SemanticCacheConfig(fusion_cache_dir=url),
        lambda url: ConnectorSettings.from_extra({"store": url}),
        lambda url: ConnectorSettings.from_extra({"store_dir": url}),
        lambda url: find_stores(url),
    ],
)
def test_an_address_is_refused_with_what_takes_its_place(
    asked: Callable[[str], object], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is no address of a store: give a folder, memory:, s3://BUCKET") as found:
        asked(url)
    assert "secret" not in str(found.value)
    assert "\n" not in str(found.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cache", "s3", "s3/bucket", "C:", "a:b", "2026-01-01T10:00", "./s3:/x"])
def test_a_folder_with_a_colon_is_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(dejakv.open_store(name)) as store:
        assert store.put(make_stored_state(1))
    assert (tmp_path / name).is_dir()

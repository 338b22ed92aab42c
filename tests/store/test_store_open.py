"""`dejakv.open_store`: one name for a store of any kind."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dejakv
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError
from dejakv.store.open import stores_in
from dejakv.testing import make_chunk


@pytest.mark.parametrize("where", [None, "memory:", "memory://"])
def test_a_store_in_memory(where: str | None) -> None:
    store = dejakv.open_store(where, max_entries=1, policy="lfu")
    assert store.put(make_chunk(1))
    assert store.put(make_chunk(2))
    assert store.stats().entries == 1


@pytest.mark.parametrize("kind", [str, Path])
def test_a_store_in_a_folder(tmp_path: Path, kind: Any) -> None:
    store = dejakv.open_store(kind(tmp_path / "store"), max_bytes=1 << 20, memory_bytes=1 << 20)
    assert store.put(make_chunk(1))
    store.close()
    again = dejakv.open_store(kind(tmp_path / "store"))
    assert again.get(make_chunk(1).meta.id) is not None
    again.close()


ADDRESS = "redis://:secret@cache.example:6379/0"


@pytest.mark.parametrize(
    "url", [ADDRESS, "http://nowhere", "s3://", "s3://key:secret@bucket/cache", "s3://b/c?secret", "://", "memory://x"]
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
        lambda url: stores_in(url),
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


def test_an_address_is_refused_on_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dejakv", "cache", "purge", "--all", "--store", ADDRESS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "is no address of a store: give a folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr

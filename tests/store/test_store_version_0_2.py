"""A folder written by DejaKV 0.2.0 (commit ac51cf55) stays warm: `version_0_2` is a copy of it, with what 0.2.0 read back from it."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.encoder_cache import VisualKVCache
from dejakv.store.open import open_store
from dejakv.store.store import Store

WRITTEN = Path(__file__).parent / "version_0_2"
EXPECTED: list[dict[str, Any]] = json.loads((WRITTEN / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(WRITTEN, tmp_path / "written")


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with closing(open_store(folder / "states")) as store:
        yield store


@pytest.mark.parametrize("entry", EXPECTED, ids=[entry["prompt"] for entry in EXPECTED])
def test_store_reads_entries_of_0_2(store: Store, entry: dict[str, Any]) -> None:
    state = store.get(entry["id"])
    assert state is not None
    meta = state.meta
    assert (meta.id, meta.partition, meta.epoch) == (entry["id"], entry["partition"], entry["epoch"])
    assert (list(meta.token_ids), meta.prompt, meta.chunk) == (entry["token_ids"], entry["prompt"], entry["text"])
    assert (meta.answer, meta.kind, meta.metadata or None) == (entry["answer"], entry["kind"], entry["metadata"])
    assert [[span.start, span.length, span.digest] for span in meta.spans] == entry["spans"]
    assert {name: vector.tolist() for name, vector in meta.vectors.items()} == entry["vectors"]
    assert (state.tensor.dtype, list(state.tensor.shape)) == (entry["dtype"], entry["shape"])
    assert hashlib.sha256(state.tensor.data.tobytes()).hexdigest() == entry["sha256"]


def test_store_finds_prefixes_of_0_2(store: Store) -> None:
    token_ids = [*EXPECTED[0]["token_ids"], 9, 9]
    hit = store.find("p", "e", token_ids)
    assert hit is not None
    assert hit[0].tokens == 40


def test_store_makes_the_catalog_of_0_2_again(folder: Path) -> None:
    (folder / "states" / "catalog.sqlite").unlink()
    with closing(open_store(folder / "states")) as store:
        hit = store.find("p", "e", EXPECTED[0]["token_ids"])
    assert hit is not None
    assert hit[0].tokens == 32  # whole blocks: the prompts were rows of the catalog


def test_encoder_cache_reads_outputs_of_0_2(folder: Path) -> None:
    picture = hashlib.sha256(b"the bytes of a picture").hexdigest()
    with VisualKVCache(disk=folder / "pictures") as cache:
        block = cache.view("encoder-1", "p").lookup(picture)
    assert block is not None
    np.testing.assert_array_equal(np.asarray(block.embedding), np.arange(32, dtype="float32").reshape(4, 8))


def test_store_counts_state_in_8_bits_of_0_2_as_a_miss(folder: Path) -> None:
    entry = "e108503586f77755631fa3ab09fd949f7904feec"
    with closing(open_store(folder / "eight_bits")) as store:
        assert store.get(entry) is None
        assert store.stats().corrupt == 1
        assert store.meta(entry) is None

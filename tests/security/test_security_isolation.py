"""Partitions and epochs never see each other: no entry, no state, no score, no figure, whatever they are called."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import rounds, soak_rounds, soak_seed
from tests.security.probes import EPOCHS, PARTITIONS, Tenants, cache_over, mark, prepared, wander

from dejakv import open_store
from dejakv.encoder_cache import VisualKVCache
from dejakv.errors import InputError
from dejakv.identity import exact_key
from dejakv.store.store import Store

LIMITS: dict[str, Any] = {"max_bytes": 400_000, "max_entries": 120}
NAMES = st.sampled_from(PARTITIONS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
REQUESTS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(EPOCHS),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.sampled_from([(), (), (0,), (1,), (0, 1), (1, 0)]),
        st.sampled_from(["keep", "keep", "ask", "clear", "look"]),
    ),
    max_size=40,
)


def store_in(kind: str, folder: Path) -> Store:
    tiers = {"memory": None, "disk": folder}
    return open_store(tiers[kind], memory_bytes=100_000 if kind == "disk" else 0, **LIMITS)


@pytest.mark.parametrize("media", ["exact", "ignore"])
@rounds(40)
@given(requests=REQUESTS)
def test_any_names_in_memory(media: str, requests: list[Any]) -> None:
    tenants = Tenants(cache_over(store_in("memory", Path()), media=media))
    for partition, epoch, words, pictures, action in requests:
        if action == "clear":
            tenants.clear(partition)
        elif action == "look":
            tenants.look_around(partition, epoch)
        else:
            tenants.ask(partition, epoch, words, pictures, keep=action == "keep")
    assert tenants.crossed == []


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("media", ["exact", "ignore"])
def test_hostile_names_in_every_store(kind: str, media: str, tmp_path: Path) -> None:
    tenants = Tenants(cache_over(store_in(kind, tmp_path), media=media))
    wander(tenants, random.Random(soak_seed()), {"memory": 1500, "disk": 400}[kind] * soak_rounds())
    assert tenants.crossed == []
    assert tenants.found > 20
    assert tenants.bodies > 5
    tenants.cache.close()


def test_a_restart_finds_everybodys_own(tmp_path: Path) -> None:
    first = Tenants(cache_over(store_in("disk", tmp_path)))
    for partition in PARTITIONS[:20]:
        first.ask(partition, "e1", [1, 2], (), keep=True)
    first.cache.close()
    again = Tenants(cache_over(store_in("disk", tmp_path)))
    for partition in PARTITIONS[:20]:
        again.ask(partition, "e1", [1, 2], (), keep=False)
        again.ask(partition, "e2", [1, 2], (), keep=False)
    assert again.crossed == []
    assert again.bodies == 20
    again.cache.close()


def test_the_check_sees_what_crosses() -> None:
    """A store that gives another's state away is noticed."""
    tenants = Tenants(cache_over(store_in("memory", Path())))
    tenants.ask("a", "e1", [1, 2], (), keep=True)
    stolen = next(tenants.cache.store.metas("a"))
    tenants._check_owner(stolen, "b", "e1")
    tenants._read(stolen, "b", "e1")
    assert len(tenants.crossed) == 2


@pytest.mark.parametrize("name", ["\ud800", "a\udfff", "\udc80b"])
def test_a_lone_surrogate_is_no_name(name: str) -> None:
    with pytest.raises(InputError, match="Unicode"):
        prepared(name, [1])
    with pytest.raises(InputError, match="Unicode"):
        exact_key(name, "e", [1], [])
    cache = cache_over(store_in("memory", Path()))
    for call in (cache.clear, cache.stats, lambda name: VisualKVCache().view("e", name)):
        with pytest.raises(InputError, match="Unicode"):
            call(name)


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_encoder_outputs(disk: bool, policy: Any, tmp_path: Path) -> None:
    cache = VisualKVCache(60, 60 * 400, policy=policy, disk=tmp_path if disk else None, disk_bytes=200_000)
    found, crossed = encoder_probes(cache, random.Random(soak_seed()), (400 if disk else 2000) * soak_rounds())
    assert found > 20
    assert crossed == []
    cache.close()


def encoder_probes(cache: VisualKVCache, rng: random.Random, probes: int) -> tuple[int, list[str]]:
    """Random lookups, computations and clearings; how many outputs were found, and those of others among them."""
    found, crossed = 0, list[str]()
    for _ in range(probes):
        partition, epoch, modality = rng.choice(PARTITIONS), rng.choice(EPOCHS), rng.choice(["image", "audio"])
        content = f"{rng.randrange(4):064x}"
        own = np.full((5, 20), mark(partition, f"{epoch}|{modality}|{content}"), np.float32)
        view, choice = cache.view(epoch, partition), rng.random()
        if choice < 0.45:
            block = view.lookup(content, modality)
            outputs = [] if block is None else [block.embedding]
        elif choice < 0.98:
            outputs = [view.get_or_compute(content, modality, lambda own=own: own)]
        else:
            others = {name: cache.view("", name).stats().entries for name in PARTITIONS if name != partition}
            view.clear()
            outputs = []
            if view.stats().entries or any(cache.view("", name).stats().entries != n for name, n in others.items()):
                crossed.append(f"clearing {partition[:20]!r}")
        found += len(outputs)
        crossed += [f"{partition[:20]!r} {epoch}" for output in outputs if not np.array_equal(output, own)]
    return found, crossed

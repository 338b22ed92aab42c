"""The store as a tier of vLLM's offloading: vLLM's own scheduler, connector, spec, managers and host memory, without a GPU.

vLLM refuses to copy between the KV cache and host memory on a CPU, so `HostWorker` stands in that one place.
"""

import copy
import os
import re
import shlex
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_engine
from test_vllm_windows import PROMPTS, tiny_model
from tests.services import wait_until
from toy_engine import ToyEngine, answer
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm_harness import DOCS, running, tokens

from dejakv.engines.vllm import identity, upstream
from dejakv.engines.vllm.tier import DejaKVOffloadingConnector, DejaKVTier
from dejakv.engines.vllm.tier.connector import TierReport
from dejakv.errors import ConfigError, StoreError
from dejakv.store.open import open_store
from dejakv.store.selection import Selection
from dejakv.store.store import Store

TIER = "dejakv.engines.vllm.tier"
PROMPT = tokens(150, 3)
WHOLE = len(PROMPT) // 16 * 16
"""Tokens of the prompt in whole blocks."""
Start = Callable[..., ToyEngine]


class HostWorker(OffloadingWorker):
    """Copies between a KV cache in host memory and vLLM's region, at once."""

    def __init__(self, spec: TieringOffloadingSpec, caches: Any) -> None:
        self._blocks_per_chunk, self._finished = spec.blocks_per_chunk, list[int]()
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._pages = [
            (each.tensor, self._region.create_next_worker_view(each.page_size_bytes * spec.blocks_per_chunk))
            for each in caches.tensors
        ]
        self._groups = [sorted({ref.tensor_idx for ref in refs}) for refs in caches.group_data_refs]

    def _rows(self, blocks: Any, chunks: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        chunk = -1
        per_chunk, block_ids, chunk_ids = self._blocks_per_chunk, iter(blocks.block_ids), iter(chunks.chunk_ids)
        for tensors, size, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            for number in range(first, first + size):
                if number == first or number % per_chunk == 0:
                    chunk = int(next(chunk_ids))
                block = next(block_ids)
                for cache, host in (self._pages[each] for each in tensors):
                    yield cache[block], host.view(host.shape[0], per_chunk, -1)[chunk, number % per_chunk]
        assert next(chunk_ids, None) is None

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for page, part in self._rows(src_spec, dst_spec):
            part.copy_(page)
        self._finished.append(job_id)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for page, part in self._rows(dst_spec, src_spec):
            page.copy_(part)
        self._finished.append(job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return [TransferResult(each, True) for each in finished]

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pages.clear()
        self._region.cleanup()


def transfer(connector: str = "DejaKVOffloadingConnector", memory: int = 64, blocks: int = 1, **tier: Any) -> Any:
    """`--kv-transfer-config` for a tier with these keys and host memory for so many chunks."""
    return KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=TIER if connector.startswith("DejaKV") else None,
        kv_role="kv_both",
        engine_id=uuid.uuid4().hex,
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": memory * 4096 * blocks,
            "blocks_per_chunk": blocks,
            "secondary_tiers": [{"type": "DejaKVTier", "module_path": TIER, **tier}],
        },
    )


@pytest.fixture
def start(toy: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an engine whose KV cache and host memory are empty: what it does not compute is from the tier."""
    monkeypatch.setattr(TieringOffloadingSpec, "get_worker", lambda spec, caches: HostWorker(spec, caches))
    return lambda store, **options: toy({}, transfer=transfer(store=str(store), **options))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def settle(engine: ToyEngine) -> None:
    """Steps until vLLM's transfers and the tier's have ended."""
    engine.drain()
    until = time.monotonic() + 60
    while engine.scheduler.connector.has_pending_push_work():
        engine.step()
        assert time.monotonic() < until


def ask(engine: ToyEngine, prompt: list[int] = PROMPT, **options: Any) -> int:
    """How many tokens were computed; the answer is full computation's."""
    asked = engine.ask(prompt, count=3, **options)
    assert asked.tokens == answer(prompt, 3, asked.weight)
    settle(engine)
    return asked.computed - 2


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The tiers' counters, as vLLM takes them in each step."""
    totals, take = Counter[str](), DejaKVTier.get_stats

    def taken(self: DejaKVTier) -> Any:
        stats = take(self)
        totals.update(stats.reduce() if stats else {})
        return stats

    monkeypatch.setattr(DejaKVTier, "get_stats", taken)
    return totals


def ids(folder: Path) -> dict[str, str]:
    """Partition of each stored chunk."""
    with_entries = open_store(folder)
    found = {meta.id: meta.partition for meta in with_entries.metas()}
    with_entries.close()
    return found


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_restart_finds_whole_chunks(start: Start, store: Path, blocks: int) -> None:
    assert ask(start(store, blocks=blocks)) == len(PROMPT)
    again = start(store, blocks=blocks)
    whole = len(PROMPT) // (16 * blocks) * 16 * blocks
    assert ask(again) == len(PROMPT) - whole
    assert again.reset()
    assert ask(again, [*PROMPT[:80], *tokens(60, 5)]) == 60 + 80 % (16 * blocks)


def test_chunks_leave_host_memory_and_come_back(start: Start, store: Path) -> None:
    """Host memory for one prompt: the first one is there again, from the store."""
    engine = start(store, memory=12)
    for prompt in (PROMPT, tokens(160, 4)):
        assert ask(engine, prompt) == len(prompt)
    assert engine.reset()
    assert ask(engine) == len(PROMPT) - WHOLE


def test_chunks_of_a_bucket_are_found_by_another_machine(start: Start, bucket: str) -> None:
    assert ask(start(bucket)) == len(PROMPT)
    assert ask(start(bucket)) == len(PROMPT) - WHOLE


def test_other_weights_layouts_and_hashes_have_other_chunks(
    start: Start, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(start(store))
    assert ask(start(store, blocks=2)) == len(PROMPT)
    monkeypatch.setattr(identity, "weights_fingerprint", lambda *given: "other weights")
    assert ask(start(store)) == len(PROMPT)


def test_salts_do_not_see_each_other_and_are_purged_alone(start: Start, store: Path) -> None:
    first = start(store)
    assert [ask(first, salt=salt) for salt in ("ann", "bob", None)] == [len(PROMPT)] * 3
    assert set(ids(store).values()) == {identity.partition_of(salt) for salt in ("ann", "bob", None)}
    purger = open_store(store)
    purged = purger.purge(Selection(partition=identity.partition_of("ann")))
    assert (purged.offload_chunks, str(purged).partition(",")[0]) == (WHOLE // 16, f"{WHOLE // 16} offload chunks")
    purger.close()
    second = start(store)
    assert [ask(second, salt=salt) for salt in ("ann", "bob", None)] == [len(PROMPT), *[len(PROMPT) - WHOLE] * 2]


def test_a_request_can_opt_out(start: Start, store: Path) -> None:
    engine = start(store)
    assert ask(engine, no_store=True) == len(PROMPT)
    assert ask(engine, tokens(90, 6), color="red") == 90
    assert not ids(store)
    assert ask(engine, tokens(100, 7), ttl=1000) == 100
    with_entries = open_store(store)
    assert {meta.ttl for meta in with_entries.metas()} == {1000}
    with_entries.close()
    again = start(store)
    assert [ask(again, tokens(100, 7), mode=mode) for mode in ("off", "exact")] == [100, 4]


def test_chunks_expire(start: Start, store: Path) -> None:
    ask(start(store, ttl=0.05))
    wait_until(lambda: not ids(store), "an empty store")
    assert ask(start(store)) == len(PROMPT)


def test_what_is_not_named_by_its_tokens_or_switched_off_is_neither_stored_nor_found(
    start: Start, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a picture vLLM's hash has an identifier that clients may choose; embeddings have no tokens.

    A streaming session may get pictures later.
    """
    engine = start(store)
    monkeypatch.setenv("DEJAKV_OFF", "1")
    assert ask(engine) == len(PROMPT)
    monkeypatch.delenv("DEJAKV_OFF")

    def embedded(*given: Any, **options: Any) -> Request:
        made = Request(*given, **options)
        made.prompt_embeds = torch.zeros(1)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(toy_engine, "Request", embedded)
        assert ask(engine, tokens(80, 4)) == 80
    arrive = DejaKVOffloadingConnector.on_new_request

    def streaming(self: DejaKVOffloadingConnector, request: Request) -> None:
        request.resumable = True
        arrive(self, request)
        request.resumable = False

    with monkeypatch.context() as patch:
        patch.setattr(DejaKVOffloadingConnector, "on_new_request", streaming)
        assert ask(engine, tokens(80, 5)) == 80
    assert not ids(store)
    assert ask(start(store)) == len(PROMPT)
    assert len(ids(store)) == WHOLE // 16


def test_damaged_chunks_are_counted_misses(start: Start, store: Path, figures: Counter[str]) -> None:
    ask(start(store))
    files = sorted(store.rglob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    for file in files[3:5]:
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        os.chmod(file, 0o600)
        file.write_bytes(content)
    computed = ask(start(store))
    assert len(PROMPT) - WHOLE < computed <= len(PROMPT)
    assert figures["vllm:dejakv_tier_damaged"] == 2
    assert ask(start(store)) == len(PROMPT) - WHOLE


def test_a_store_that_vanishes_costs_misses(start: Start, store: Path) -> None:
    engine = start(store)
    shutil.rmtree(store)
    assert ask(engine) == len(PROMPT)
    assert ask(engine, tokens(60, 9)) == 60


def test_a_full_store_evicts_and_one_that_is_too_small_refuses(
    start: Start, store: Path, figures: Counter[str]
) -> None:
    engine = start(store, max_bytes=5 * 6000)
    assert [ask(engine), ask(engine, tokens(160, 4))] == [len(PROMPT), 160]
    assert figures["vllm:dejakv_tier_evicted:('bytes',)"] > 0
    assert ask(start(store.parent / "tiny", max_bytes=100)) == len(PROMPT)
    assert figures["vllm:dejakv_tier_refused:('too_large',)"] == WHOLE // 16


def test_changed_weights_end_reuse_until_a_reset(start: Start, store: Path) -> None:
    """What was stored last leaves: the change may be older than its discovery."""
    engine = start(store)
    ask(engine)
    engine.model.weight.add_(1)
    engine.ask(tokens(60, 9))
    settle(engine)
    wait_until(lambda: not ids(store), "an empty store")
    assert engine.reset(connector=True)
    assert ask(engine) == len(PROMPT)
    first = start(store)
    assert ask(first) == len(PROMPT)


def test_host_memory_of_changed_weights_is_not_loaded_from(start: Start, store: Path) -> None:
    """vLLM's own memory, which a request asks before the tier."""
    engine = start(store)
    ask(engine)
    engine.model.weight.add_(1)
    engine.ask(tokens(60, 9))
    settle(engine)
    assert engine.reset()
    assert ask(engine) == len(PROMPT)


def test_news_of_weights_before_a_reset_do_not_end_reuse_after_it(start: Start, store: Path) -> None:
    engine = start(store)
    ask(engine)
    late = KVConnectorOutput(kv_connector_worker_meta=TierReport(changed=[0]))
    assert engine.reset(connector=True)
    engine.scheduler.connector.update_connector_output(late)
    ask(engine)
    assert engine.reset()
    assert ask(engine) == len(PROMPT) - WHOLE


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A store that takes no chunk before this is set."""
    ready, put = threading.Event(), Store.put

    def waiting(self: Store, stored: Any) -> bool:
        assert ready.wait(20)
        return put(self, stored)

    monkeypatch.setattr(Store, "put", waiting)
    yield ready
    ready.set()


def answered(engine: ToyEngine, prompt: list[int]) -> None:
    """Asks, and waits for the answer and its way to host memory alone."""
    name = engine.add(prompt)
    while not engine.asked[name].over:
        engine.step()
    for _ in range(3):
        engine.step()


def test_what_waits_to_be_stored_is_given_up_when_weights_change(
    start: Start, store: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has begun is removed again, also if that fails at first."""
    tries, delete = Counter[str](), Store.delete

    def failing(self: Store, id: str) -> bool:
        tries[id] += 1
        return tries[id] > 1 and delete(self, id)

    monkeypatch.setattr(Store, "delete", failing)
    engine = start(store)
    answered(engine, PROMPT)
    engine.model.weight.add_(1)
    answered(engine, tokens(60, 9))
    slow.set()
    settle(engine)
    wait_until(lambda: len(tries) == 2, "the chunks that had begun")
    assert engine.reset(connector=True)
    wait_until(lambda: not ids(store), "an empty store")
    assert set(tries.values()) == {2}


def test_a_reset_waits_for_what_has_begun_alone(start: Start, store: Path, slow: threading.Event) -> None:
    engine = start(store)
    answered(engine, PROMPT)
    threading.Timer(0.2, slow.set).start()
    assert engine.reset(connector=True)
    settle(engine)
    assert len(ids(store)) <= 2


def test_what_waits_to_be_stored_leaves_host_memory_to_others(
    start: Start, store: Path, slow: threading.Event, figures: Counter[str]
) -> None:
    engine = start(store)
    for number in range(5):
        answered(engine, tokens(96, number))
    slow.set()
    settle(engine)
    ask(engine, tokens(20, 9))
    assert figures["vllm:dejakv_tier_refused:('crowded',)"] + len(ids(store)) == 5 * 6 + 1
    assert 16 <= len(ids(store)) < 30


def test_tiers_of_one_server_have_expiries_of_their_own(start: Start, toy: Start, store: Path, tmp_path: Path) -> None:
    config = transfer(store=str(store), ttl=1000)
    tiers = config.kv_connector_extra_config["secondary_tiers"]
    tiers.append({**tiers[0], "store": str(tmp_path / "other"), "ttl": 3000})
    ask(toy({}, transfer=config), ttl=2000)
    for folder, ttl in ((store, 1000), (tmp_path / "other", 2000)):
        with_entries = open_store(folder)
        assert {meta.ttl for meta in with_entries.metas()} == {ttl}
        with_entries.close()


def test_a_reset_with_the_same_weights_costs_nothing(start: Start, store: Path) -> None:
    engine = start(store)
    ask(engine)
    assert engine.reset(connector=True)
    ask(engine, tokens(20, 9))
    assert ask(engine) == len(PROMPT) - WHOLE


def test_requests_that_end_early_leave_no_chunk_in_use(start: Start, store: Path) -> None:
    engine = start(store, memory=14)
    ask(engine)
    assert engine.reset()
    for number in range(4):
        name = engine.add(PROMPT if number % 2 else tokens(150, number))
        for _ in range(number):
            engine.step()
        engine.abort(name)
    settle(engine)
    assert engine.held == 0
    assert engine.reset()
    assert ask(engine) == len(PROMPT) - WHOLE


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"store": None}, "set store to a folder or a bucket"),
        ({"store": "memory:"}, "set store to a folder or a bucket"),
        ({"stor": "x"}, "stor"),
        ({"store": "x", "max_bytes": -1}, "max_bytes=-1"),
        ({"store": "x", "second_sight": True}, "leave min_tokens and second_sight out"),
        ({"store": "x", "feed": "redis://localhost"}, "feed"),
        ({"store": "x", "locality": "NEAR"}, "give LOCAL or REMOTE"),
    ],
)
def test_wrong_settings_end_the_start_with_their_remedy(toy: Start, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        toy({}, transfer=transfer(**keys))


def test_a_store_that_cannot_be_opened_ends_the_start(toy: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a store")
    with pytest.raises(ConfigError, match="is a file: give a folder"):
        toy({}, transfer=transfer(store=str(tmp_path / "file")))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter").write_text("not a store")
    with pytest.raises(StoreError, match="letter"):
        toy({}, transfer=transfer(store=str(tmp_path / "other")))


def test_the_tier_needs_the_connector_that_knows_the_weights(toy: Start, store: Path) -> None:
    with pytest.raises(ConfigError, match='set kv_connector to "DejaKVOffloadingConnector"'):
        toy({}, transfer=transfer("OffloadingConnector", store=str(store)))


@pytest.mark.parametrize(
    ("settings", "groups", "why"),
    [
        ({"cache_config.prefix_caching_hash_algo": "xxhash"}, [1], "prefix-caching-hash-algo"),
        ({"lora_config": object()}, [1], "LoRA"),
        ({"speculative_config": object()}, [1], "speculative decoding"),
        ({}, [1, 2], "KV cache groups of different sizes"),
        ({"page_size_padded": 8192}, [1, 1], "KV cache groups of different sizes"),
        ({"parallel_config.pipeline_parallel_size": 2}, [1], "pipeline parallelism"),
        ({"parallel_config.decode_context_parallel_size": 2}, [1], "context parallelism"),
        ({}, [2], "sliding windows with offload chunks of several blocks"),
    ],
)
def test_what_was_not_shown_to_be_exact_and_apart_is_refused(
    store: Path, settings: dict[str, Any], groups: list[int], why: str
) -> None:
    config = copy.deepcopy(toy_engine._base_config())
    config.kv_transfer_config, config.cache_config.block_size = transfer(store=str(store), blocks=2), toy_engine.BLOCK
    padded = settings.get("page_size_padded")
    for name, value in settings.items():
        part, _, name = name.rpartition(".")
        setattr(getattr(config, part) if part else config, name, value)
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=4, dtype=torch.float32, sliding_window=32, page_size_padded=padded
    )
    kv = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"{number}.{layer}" for layer in range(layers)], window)
            for number, layers in enumerate(groups)
        ],
    )
    with pytest.raises(ConfigError, match=f"DejaKVOffloadingConnector does not support: .*{why}"):
        DejaKVOffloadingConnector(config, KVConnectorRole.SCHEDULER, kv)


def test_a_vllm_without_the_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = upstream.UpstreamUse("vllm.v1.kv_offload.tiers:Gone", "", "there are no tiers", "tier")
    monkeypatch.setattr(upstream.versions, "USES", (gone,))
    with pytest.raises(ConfigError, match=r"it has no vllm.v1.kv_offload.tiers:Gone \(there are no tiers\)"):
        upstream.usable("tier")
    with pytest.raises(ConfigError, match="tier leans on more of it"):
        upstream.usable("tier", "0.33.0")


def test_the_documented_command_starts_the_tier(start: Start, toy: Start, store: Path) -> None:
    """As vLLM reads it, with this machine's folder and less memory in place of the example's."""
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "offloading.md").read_text()
    [command] = re.findall(r"^```\n(vllm serve .*?)^```", page, re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("MODEL", str(DOCS)).replace("/var/lib/dejakv", str(store)))
    assert words[:2] == ["vllm", "serve"]
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    config, extra = given.kv_transfer_config, given.kv_transfer_config.kv_connector_extra_config
    assert given.shutdown_timeout == 60
    assert KVConnectorFactory.get_connector_class(config) is DejaKVOffloadingConnector
    assert OffloadingSpecFactory.get_spec_cls(extra) is TieringOffloadingSpec
    [tier] = extra["secondary_tiers"]
    assert SecondaryTierFactory.get_tier_class(tier) is DejaKVTier
    assert set(TieringOffloadingSpec.build_metric_definitions(extra)) >= set(DejaKVTier.build_metric_definitions(tier))

    extra["cpu_bytes_to_use"] = 64 * 4096
    assert ask(toy({}, transfer=config)) == len(PROMPT)
    assert ask(start(store)) == len(PROMPT) - WHOLE


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "blocks"), [("docs-lm", 1), ("docs-lm", 3), ("gemma3", 1), ("gpt-oss", 1), ("mistral_window", 1)]
)
def test_hits_of_real_engines_are_exact(start: Start, store: Path, tmp_path: Path, name: str, blocks: int) -> None:
    """One KV cache group and several, with windows; prompts are computed in several steps."""
    folder = DOCS if name == "docs-lm" else tiny_model(name, tmp_path / "model")
    options = {"max_num_batched_tokens": 160}
    with running(folder, connector=False, **options) as engine:
        plain = [engine.ask([prompt], max_tokens=6)[0].tokens for prompt in PROMPTS]
    for cached in (0, 384):
        settings = transfer(memory=4096, blocks=blocks, store=str(store))
        with running(folder, transfer=settings, **options) as engine:
            hits = engine.ask(PROMPTS, max_tokens=6)
            assert [hit.tokens for hit in hits] == plain
            assert min(hit.cached for hit in hits) >= cached
            while engine.core.scheduler.has_requests():
                engine.core.step()

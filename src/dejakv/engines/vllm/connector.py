# pyright: reportMissingImports=false
"""`DejaKVConnector`: what vLLM loads. It forwards to the scheduler side or the worker side and keeps nothing itself.

--kv-transfer-config '{"kv_connector": "DejaKVConnector",
                       "kv_connector_module_path": "dejakv.engines.vllm.connector",
                       "kv_role": "kv_both",
                       "kv_connector_extra_config": {"store": "/var/lib/dejakv"}}'
"""

import logging
import math
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from dejakv.blend.sentences import sentence_ends
from dejakv.cache import HierarchicalCache
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.bind import EXTENSION, bound_runner, watched_model
from dejakv.engines.vllm.blend.blend import BlendRunner
from dejakv.engines.vllm.blend.model import LayerRotaryTables
from dejakv.engines.vllm.blend.names import ApproximateNames, is_approximate
from dejakv.engines.vllm.blend.rows import RowForward
from dejakv.engines.vllm.generations import UNCLEAN, WeightsWatch
from dejakv.engines.vllm.identity import LoraAdapters, server_epoch
from dejakv.engines.vllm.lookups import LookupRunner
from dejakv.engines.vllm.messages import StepPlan, StepReport
from dejakv.engines.vllm.pages import PagedKV
from dejakv.engines.vllm.prometheus import DejaKVPromMetrics
from dejakv.engines.vllm.ranks import ALONE, RankGroup, is_apart, rank_count, settings_of_rank
from dejakv.engines.vllm.refusals import refuse_beside_others, refuse_unsupported
from dejakv.engines.vllm.saves import SaveLimits
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.stats import ConnectorCounts, DejaKVStats
from dejakv.engines.vllm.stores import EveryRank, open_store
from dejakv.engines.vllm.worker import WorkerSide
from dejakv.errors import ConfigError
from dejakv.identity import BLOCK_TOKENS

log = logging.getLogger("dejakv.vllm")

_RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING lets other weights be loaded behind an adapter's id: unset it for reuse"


def make_scheduler_side(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, counts: ConnectorCounts
) -> SchedulerSide:
    """Make the scheduler side. Raises: ConfigError, StoreError, MissingExtraError."""
    base_epoch = server_epoch(vllm_config, kv_cache_config)
    adapters = LoraAdapters(
        base_epoch,
        upstream.adapters_applied(vllm_config),
        _RUNTIME if upstream.adapters_change_at_runtime() else "",
        upstream.adapters_leak(vllm_config),
    )

    ranks = rank_count(vllm_config)
    stores = [open_store(settings_of_rank(settings, rank, ranks), vllm_config) for rank in range(ranks)]
    store = stores[0] if ranks == 1 else EveryRank(stores)
    config = settings.cache_config()
    lookups = LookupRunner(HierarchicalCache(store, config=config), settings, adapters)

    budget = vllm_config.scheduler_config.max_num_batched_tokens
    # Without vLLM's prefix cache no block is ever shared.
    shares_blocks = vllm_config.cache_config.enable_prefix_caching
    names = ApproximateNames(
        settings,
        upstream.hash_block_tokens(kv_cache_config),
        upstream.block_tokens(kv_cache_config),
        settings.max_generation if shares_blocks else 0,
    )

    return SchedulerSide(
        settings,
        lookups,
        names,
        counts,
        max_tokens=budget,
        ranks=ranks,
        save_room=save_room(settings_of_rank(settings, 0, ranks), kv_cache_config),
        arithmetic=upstream.arithmetic(vllm_config),
        bitwise=upstream.is_batch_invariant(),
        whole=upstream.decodes_alone_behind(vllm_config),
    )


def save_room(settings: ConnectorSettings, kv_cache_config: Any) -> SaveLimits:
    """Limits of one rank's saves."""
    token_bytes = upstream.bytes_per_token(kv_cache_config)
    # An increment must begin where vLLM's blocks and the store's index both have a border.
    unit = math.lcm(upstream.block_tokens(kv_cache_config), BLOCK_TOKENS)
    max_stored_tokens = max(1, settings.max_bytes // token_bytes) if settings.max_bytes else 0
    drops = upstream.drops_blocks(kv_cache_config)
    return SaveLimits(
        settings.max_pending_bytes // token_bytes, unit, max_stored_tokens, drops, upstream.is_stepped_by_hand()
    )


def make_worker_side(vllm_config: Any, settings: ConnectorSettings, paged: PagedKV, *, blends: bool) -> WorkerSide:
    """Make the worker side. Raises: ConfigError, StoreError, ModelError."""
    settings = settings_of_rank(settings, upstream.rank(), rank_count(vllm_config))
    weights_watch = WeightsWatch.of(watched_model(vllm_config))
    blend_runner = blender_for(vllm_config, settings, paged) if blends else None
    store = open_store(settings, vllm_config, writing=True)
    return WorkerSide(store, paged, blend_runner, weights_watch, settings.load_timeout_s, settings.max_pending_bytes)


def blender_for(vllm_config: Any, settings: ConnectorSettings, paged: PagedKV) -> BlendRunner:
    """Make the blender of the worker's model. Raises: ConfigError if the worker was not handed over, ModelError if keys of the model cannot
    be moved."""
    runner = bound_runner(vllm_config)
    if runner is None:
        raise ConfigError(
            f"blend computes with the served model and needs to be given it: add --worker-extension-cls {EXTENSION}"
        )

    model = runner.get_model()
    # Wrapped layers would add the adapters of vLLM's next step to the blend's rows.
    if vllm_config.lora_config is not None:
        model = upstream.without_adapters(model)

    rotary = LayerRotaryTables.of(model, list(paged.layers.values()))
    forward = RowForward(runner, model, paged.layers, paged.block_tokens)
    ends = sentence_ends(upstream.tokenizer_of(vllm_config))
    return BlendRunner(
        forward,
        rotary,
        paged,
        settings.blend_config(),
        vllm_config.model_config.max_model_len,
        vllm_config.scheduler_config.max_num_batched_tokens,
        ends,
        RankGroup(upstream.ranks_group()) if rank_count(vllm_config) > 1 else ALONE,
    )


class DejaKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector. Raises, at start: ConfigError for unsupported settings, StoreError for an unusable store."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = ConnectorSettings.from_extra(self._kv_transfer_config.kv_connector_extra_config)
        no_blend = upstream.usable("blend" if self.settings.may_blend else "exact")
        self._blends = self.settings.may_blend and not no_blend
        refuse_unsupported(vllm_config, kv_cache_config, self.settings)
        refuse_beside_others(vllm_config, upstream.engine_transfer(), self.settings, DejaKVConnector)

        self._counts = ConnectorCounts()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            # vLLM's default fails a request whose state cannot be read. Of the engine's policy where this connector is alone.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            self._scheduler = make_scheduler_side(vllm_config, kv_cache_config, self.settings, self._counts)
            self._scheduler.no_blend = no_blend
            # Other versions are not checked at the start for what this wraps.
            if upstream.is_tested():
                upstream.leave_room(upstream.calling_scheduler(), self._scheduler.room)

    # Scheduler side

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._blends:
            # Whoever reads the events would take these blocks for exact ones.
            upstream.hide_events(kv_cache_manager, is_approximate)
        if upstream.is_tested():
            self.scheduler_side.names.is_cached = partial(upstream.is_cached, kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self.scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        manager = self._kv_cache_manager
        assert manager is not None
        return self.scheduler_side.plan_step(scheduler_output, manager.get_block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        # None without news; that the step is over counts nevertheless.
        report = connector_output.kv_connector_worker_meta
        self.scheduler_side.heard(report if isinstance(report, StepReport) else StepReport())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        blocks_wait, response_params = self.scheduler_side.finished(request, block_ids)
        return blocks_wait, response_params or None

    def reset_cache(self) -> bool:
        """False if vLLM's own prefix cache still holds what was computed before the reset: nothing is stored or used until
        a reset finds no block in use."""
        clean = upstream.prefix_cache_is_empty(self._kv_cache_manager)
        if not clean:
            log.warning("the reset was not whole, so nothing is stored or reused: %s", UNCLEAN)
        self.scheduler_side.reset("" if clean else UNCLEAN)
        return clean

    # Worker side

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = upstream.attention_layers(self._vllm_config, kv_caches)
        kv = self._kv_cache_config
        dtype = self._vllm_config.model_config.dtype
        groups = upstream.groups_of(kv)
        paged = PagedKV(
            layers, kv_caches, upstream.block_tokens(kv), kv.num_blocks, dtype, groups, entries=self._blends
        )
        self._worker = make_worker_side(self._vllm_config, self.settings, paged, blends=self._blends)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are copied in one go, behind a step (`SaveLimits.at_once`)."""

    def wait_for_save(self) -> None:
        self.worker_side.copy_saves(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        released, over, failed = self.worker_side.finish(self._plan())
        return KVConnectorTransferResults(released, over, failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.report()

    # Both

    def get_kv_connector_stats(self) -> DejaKVStats | None:
        if self._scheduler is not None:
            self._counts.absent(self._scheduler.lookups.cache.store.absences())
        stats = DejaKVStats(self._counts.take())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            # A worker in a process of its own is killed soon after vLLM stops.
            self._worker.close(upstream.seconds_to_stop() if is_apart(self._vllm_config) else 30.0)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DejaKVStats:
        return DejaKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> DejaKVPromMetrics:
        return DejaKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


upstream.register(DejaKVConnector)

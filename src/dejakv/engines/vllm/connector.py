# pyright: reportMissingImports=false
"""`DejaKVConnector`: what vLLM loads. It forwards to the scheduler side or the worker side and keeps nothing itself.

--kv-transfer-config '{"kv_connector": "DejaKVConnector",
                       "kv_connector_module_path": "dejakv.engines.vllm.connector",
                       "kv_role": "kv_both",
                       "kv_connector_extra_config": {"store_dir": "/var/lib/dejakv"}}'
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from dejakv.engines.vllm import compat, compat_callers, compat_scheduler
from dejakv.engines.vllm.assembly import blender_for, make_scheduler_side, make_worker_side
from dejakv.engines.vllm.counts import Counts
from dejakv.engines.vllm.forwarding import Forwarding
from dejakv.engines.vllm.generations import UNCLEAN
from dejakv.engines.vllm.inner import inner_config, open_inner
from dejakv.engines.vllm.messages import StepPlan, StepReport
from dejakv.engines.vllm.paged import PagedKV
from dejakv.engines.vllm.promoting import Promoting
from dejakv.engines.vllm.refusals import refuse_unsupported
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.stats import DejaKVPromMetrics, DejaKVStats
from dejakv.engines.vllm.watch import Watch
from dejakv.engines.vllm.weights import Weights
from dejakv.engines.vllm.worker import WorkerSide


class DejaKVConnector(Forwarding):
    """Does not declare `SupportsHMA`: vLLM then keeps one KV cache group that holds every token, sliding windows or not.

    Raises at start, with the reason: ConfigError for what is not supported, StoreError for a store that is unusable."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = ConnectorSettings.from_extra(self._kv_transfer_config.kv_connector_extra_config)
        compat.require_usable(blend=self.settings.may_blend)
        refuse_unsupported(vllm_config, kv_cache_config)
        self._counts = Counts()
        self._inner = open_inner(self.settings, vllm_config, role, kv_cache_config)
        scheduling = role == KVConnectorRole.SCHEDULER
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if scheduling:
            scheduler = compat_callers.calling_scheduler()
            compat_scheduler.recompute_failed_loads(scheduler)
            self._scheduler = make_scheduler_side(vllm_config, kv_cache_config, self.settings, self._counts)
            self._scheduler.fail_loads = partial(compat_scheduler.fail_loads, scheduler)
            self._scheduler.leave_room = partial(compat_scheduler.leave_room, scheduler)
            self._scheduler.promoting = Promoting(
                partial(compat_scheduler.add_again, scheduler),
                partial(compat_scheduler.abort, scheduler),
                partial(compat_scheduler.is_paused, scheduler, compat_callers.calling_engine()),
            )
        else:
            self._worker = make_worker_side(vllm_config, self.settings)

    # Scheduler side

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.unfile = partial(
            compat.unfile, kv_cache_manager, compat.block_tokens(self._kv_cache_config)
        )
        if self._inner is not None:
            self._inner.connector.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.new_request(request)
        if self._inner is not None:
            self._inner.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._inner is not None:
            tokens, later = self._inner.matched_tokens(request, num_computed_tokens)
            if tokens is None or tokens > 0:
                return tokens, later
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._inner is not None:
            mine = self._inner.allocated(request, blocks, num_external_tokens)
            if mine:
                self.scheduler_side.loaded_elsewhere(request, mine)
                return
        if num_external_tokens > 0:
            approximate = self.scheduler_side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)
            if approximate and self._inner is not None:
                self._inner.bar(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        manager = self._kv_cache_manager
        assert manager is not None
        plan = self.scheduler_side.plan_step(scheduler_output, lambda request_id: manager.get_block_ids(request_id)[0])
        if self._inner is not None:
            plan.inner = self._inner.plan_step(scheduler_output)
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        report = said if isinstance(said, StepReport) else StepReport()
        self.scheduler_side.heard(report)
        if self._inner is not None:
            if report.changed or report.weights:
                self._inner.closed &= not self.scheduler_side.generations.of_the_start
                self._inner.closed |= report.changed
            theirs = replace(connector_output, kv_connector_worker_meta=report.inner)
            self._inner.connector.update_connector_output(theirs)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        held, theirs = (False, None) if self._inner is None else self._inner.finished(request, block_ids)
        # Blocks can be handed over once only: where the wrapped connector has them, our own copy is not made.
        ours, told = self.scheduler_side.finished(request, [] if held else block_ids)
        return held or ours, {**(theirs or {}), **told} or None

    def reset_cache(self) -> bool:
        """False if vLLM's own prefix cache still holds what was computed before the reset: nothing is stored or used until
        a reset finds no block in use."""
        clean = compat.prefix_cache_is_empty(self._kv_cache_manager)
        self.scheduler_side.reset("" if clean else UNCLEAN)
        if self._inner is not None:
            self._inner.reset(clean)
        return clean

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping while prompts wait for idle time."""
        waiting = self._scheduler is not None and self._scheduler.promoting.pending
        return waiting or super().has_pending_push_work()

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
        layers = compat.attention_layers(self._vllm_config, kv_caches)
        paged = PagedKV(layers, kv_caches, compat.block_tokens(self._kv_cache_config))
        model = compat_callers.calling_model()
        watch = Watch(None if model is None else Weights(model))
        self.worker_side.ready(paged, blender_for(self._vllm_config, self.settings, paged), watch)
        if self._inner is not None:
            self._inner.connector.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._inner is not None:
            self._inner.bind(self._plan().inner)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self._inner is not None:
            self._inner.connector.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._inner is not None:
            self._inner.connector.start_load_kv(forward_context, **kwargs)
        self.worker_side.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Our own loads are over before their request is scheduled."""
        if self._inner is not None:
            self._inner.connector.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Our own saves are copied in one go, one step after the prompt was computed."""
        if self._inner is not None:
            self._inner.connector.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self.worker_side.copy_saves(self._plan())
        if self._inner is not None:
            self._inner.connector.wait_for_save()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._inner is not None:
            assert isinstance(kv_connector_metadata, StepPlan)
            self._inner.connector.handle_preemptions(kv_connector_metadata.inner)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._inner is None else self._inner.connector.get_block_ids_with_load_errors()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        released, over, failed = self.worker_side.finish(self._plan())
        ours = KVConnectorTransferResults(released, over, failed)
        return ours if self._inner is None else self._inner.results(finished_req_ids, ours)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker_side.report()
        theirs = None if self._inner is None else self._inner.connector.build_connector_worker_meta()
        return report if theirs is None else replace(report or StepReport(), inner=theirs)

    # Both

    def get_kv_connector_stats(self) -> DejaKVStats | None:
        theirs = None if self._inner is None else self._inner.connector.get_kv_connector_stats()
        stats = DejaKVStats(self._counts.take(), theirs, self.settings.inner)
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.lookups.close()
        if self._worker is not None:
            self._worker.close()
        if self._inner is not None:
            self._inner.connector.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DejaKVStats:
        return DejaKVStats.of(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> DejaKVPromMetrics:
        config = inner_config(vllm_config, vllm_config.kv_transfer_config.kv_connector_extra_config)
        inner = (
            None
            if config is None
            else config[0].build_prom_metrics(config[1], metric_types, labelnames, per_engine_labelvalues)
        )
        return DejaKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, inner)


compat.register(DejaKVConnector)

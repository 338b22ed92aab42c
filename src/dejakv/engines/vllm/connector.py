# pyright: reportMissingImports=false
"""`DejaKVConnector`: what vLLM loads. It forwards to the scheduler side or the worker side and keeps nothing itself.

--kv-transfer-config '{"kv_connector": "DejaKVConnector",
                       "kv_connector_module_path": "dejakv.engines.vllm.connector",
                       "kv_role": "kv_both",
                       "kv_connector_extra_config": {"store_dir": "/var/lib/dejakv"}}'
"""

from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from dejakv.engines.vllm import compat, compat_callers, compat_scheduler
from dejakv.engines.vllm.assembly import blender_for, make_scheduler_side, make_worker_side
from dejakv.engines.vllm.counts import ConnectorCounts
from dejakv.engines.vllm.generations import UNCLEAN
from dejakv.engines.vllm.messages import StepPlan, StepReport
from dejakv.engines.vllm.paged import PagedKV
from dejakv.engines.vllm.refusals import refuse_unsupported
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.stats import DejaKVPromMetrics, DejaKVStats
from dejakv.engines.vllm.watch import Watch
from dejakv.engines.vllm.weights import WeightDigests
from dejakv.engines.vllm.worker import WorkerSide


class DejaKVConnector(KVConnectorBase_V1):
    """Does not declare `SupportsHMA`: vLLM then keeps one KV cache group that holds every token, sliding windows or not.

    Raises at start, with the reason: ConfigError for what is not supported, StoreError for a store that is unusable."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = ConnectorSettings.from_extra(self._kv_transfer_config.kv_connector_extra_config)
        compat.require_usable(blend=self.settings.may_blend)
        refuse_unsupported(vllm_config, kv_cache_config)
        self._counts = ConnectorCounts()
        scheduling = role == KVConnectorRole.SCHEDULER
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if scheduling:
            scheduler = compat_callers.calling_scheduler()
            compat_scheduler.recompute_failed_loads(scheduler)
            self._scheduler = make_scheduler_side(vllm_config, kv_cache_config, self.settings, self._counts)
            self._scheduler.fail_loads = partial(compat_scheduler.fail_loads, scheduler)
            self._scheduler.leave_room = partial(compat_scheduler.leave_room, scheduler)
        else:
            self._worker = make_worker_side(vllm_config, self.settings)

    # Scheduler side

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self.scheduler_side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        manager = self._kv_cache_manager
        assert manager is not None
        return self.scheduler_side.plan_step(scheduler_output, lambda request_id: manager.get_block_ids(request_id)[0])

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        self.scheduler_side.heard(said if isinstance(said, StepReport) else StepReport())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        held, told = self.scheduler_side.finished(request, block_ids)
        return held, told or None

    def reset_cache(self) -> bool:
        """False if vLLM's own prefix cache still holds what was computed before the reset: nothing is stored or used until
        a reset finds no block in use."""
        clean = compat.prefix_cache_is_empty(self._kv_cache_manager)
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
        layers = compat.attention_layers(self._vllm_config, kv_caches)
        paged = PagedKV(layers, kv_caches, compat.block_tokens(self._kv_cache_config))
        model = compat_callers.calling_model()
        watch = Watch(None if model is None else WeightDigests(model))
        self.worker_side.ready(paged, blender_for(self._vllm_config, self.settings, paged), watch)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are copied in one go, one step after the prompt was computed."""

    def wait_for_save(self) -> None:
        self.worker_side.copy_saves(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        released, over, failed = self.worker_side.finish(self._plan())
        return KVConnectorTransferResults(released, over, failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.report()

    # Both

    def get_kv_connector_stats(self) -> DejaKVStats | None:
        stats = DejaKVStats(self._counts.take())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.lookups.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DejaKVStats:
        return DejaKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> DejaKVPromMetrics:
        return DejaKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


compat.register(DejaKVConnector)

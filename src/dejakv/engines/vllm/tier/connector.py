# pyright: reportMissingImports=false
"""`DejaKVOffloadingConnector`: vLLM's offloading, with the server's identity for `DejaKVTier`.

vLLM gives a tier neither the server's configuration nor a request's `cache_salt`, and its tiers do
not learn that weights were changed. The connector has all three.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from dejakv.config import switched_off
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.bind import watched_model
from dejakv.engines.vllm.generations import CHANGED, UNCLEAN, WeightGenerations, WeightsWatch
from dejakv.engines.vllm.identity import partition_of, server_epoch
from dejakv.engines.vllm.refusals import OFFLOADING_REFUSALS, refuse
from dejakv.engines.vllm.tier.manager import SERVER, DejaKVTier, ServerIdentity
from dejakv.identity import epoch_of


@dataclass
class TierPlan(OffloadingConnectorMetadata):
    """vLLM's orders for a step, with the generation of the weights."""

    generation: int = 0


@dataclass
class TierReport(OffloadingWorkerMetadata):
    """vLLM's report of a worker, with its news of the weights (`WeightsWatch.take_news`)."""

    answers: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    changed: list[int] = field(default_factory=list[int])
    """Generations in which a change was noticed."""

    def aggregate(self, other: Any) -> "TierReport":
        """Add another worker's report."""
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        assert isinstance(other, TierReport)
        return TierReport(
            merged.completed_jobs,
            merged.transfer_stats,
            [*self.answers, *other.answers],
            [*self.changed, *other.changed],
        )


class DejaKVOffloadingConnector(OffloadingConnector):
    """vLLM's `OffloadingConnector` for servers with a `DejaKVTier`.

    Raises
    ------
    ConfigError
        At the start: a feature of the server is not supported.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        refuse("DejaKVOffloadingConnector", OFFLOADING_REFUSALS, vllm_config, kv_cache_config)
        self._watch: WeightsWatch | None = None
        self._generation = 0
        self._server: ServerIdentity | None = None
        if role == KVConnectorRole.SCHEDULER:
            epoch = _chunk_epoch(vllm_config, kv_cache_config)
            workers = vllm_config.parallel_config.world_size
            self._server = ServerIdentity(WeightGenerations(epoch, workers))

        token = SERVER.set(self._server)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            SERVER.reset(token)

    # Scheduler side

    @property
    def server(self) -> ServerIdentity:
        """Identity of the server; only the instance in the scheduler has it."""
        assert self._server is not None
        return self._server

    def on_new_request(self, request: Any) -> None:
        """Hand a request to vLLM's offloading, and its partition to the tiers.

        vLLM names chunks with media by an identifier that a client may choose, so these requests
        are neither stored nor looked up. A request that goes on may get media later.
        """
        by_tokens = (
            not request.resumable and not request.mm_features and request.prompt_embeds is None
        )
        if by_tokens and not switched_off():
            self.server.partition = partition_of(request.cache_salt)
        try:
            super().on_new_request(request)
        finally:
            self.server.partition = None

    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        # vLLM's host memory knows nothing of weights, and a request asks it before the tiers.
        if self.server.generations.problem:
            return 0
        return super()._max_loadable_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TierPlan:
        """Return the worker's orders for this step."""
        plan = super().build_connector_meta(scheduler_output)
        return TierPlan(**vars(plan), generation=self.server.generations.number)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the workers' report of a step, the news of the weights first."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, TierReport):
            generations = self.server.generations
            for number, same in report.answers:
                generations.record_answer(number, same)
            if report.changed:
                # After a reset the workers read all weights anew: older news tell nothing of them.
                if generations.number in report.changed:
                    generations.begin(CHANGED)
                for tier in self._tiers():
                    tier.forget_suspects()
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool:
        """Empty vLLM's host memory and begin a generation of weights.

        Returns
        -------
        bool
            False if vLLM's own prefix cache still holds what was computed before. Nothing is stored
            or loaded until a reset finds no block in use.
        """
        # Chunks that are under way belong to the generation before: they are waited for.
        super().reset_cache()
        clean = upstream.prefix_cache_is_empty(self._kv_cache_manager)
        self.server.generations.begin("" if clean else UNCLEAN)
        return clean

    def _tiers(self) -> list[DejaKVTier]:
        tiers = getattr(self.scheduler.manager, "secondary_tiers", ())
        return [tier for tier in tiers if isinstance(tier, DejaKVTier)]

    # Worker side

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Create vLLM's worker side, and watch the weights."""
        super().register_kv_caches(kv_caches)
        self._watch = WeightsWatch.for_model(watched_model(self._vllm_config))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Check the weights in steps that load or store, and start the copies."""
        plan = self._connector_metadata
        assert isinstance(plan, TierPlan)
        assert self._watch is not None
        moving = bool(plan.load_jobs or plan.store_jobs)
        self._generation = plan.generation
        self._watch.step(plan.generation, computing=moving, using=moving)
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> TierReport | None:
        """Return a report of what has ended and of the weights; None without news."""
        assert self._watch is not None
        report = super().build_connector_worker_meta()
        answers, changed = self._watch.take_news()
        if report is None and not answers and not changed:
            return None
        report = report or OffloadingWorkerMetadata()
        noticed = [self._generation] if changed else []
        return TierReport(report.completed_jobs, report.transfer_stats, answers, noticed)


def _chunk_epoch(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the epoch of the server's chunks: of its state, and of their layout and names."""
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    # What is of this process alone changes no byte of a chunk.
    layout = replace(
        offloading,
        extra_config={},
        enable_kv_cache_events=False,
        engine_id="",
        parallel=replace(
            offloading.parallel, rank=0, data_parallel_index=0, data_parallel_rank_local=None
        ),
    )
    return epoch_of(
        {
            "server": server_epoch(vllm_config, kv_cache_config),
            "layout": repr(layout),
            "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
        }
    )


upstream.register(DejaKVOffloadingConnector)

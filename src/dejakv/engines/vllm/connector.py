# pyright: reportMissingImports=false
"""`DejaKVConnector`, the class that vLLM loads.

The connector forwards to the scheduler side or the worker side and holds no state beside them.

    --kv-transfer-config '{"kv_connector": "DejaKVConnector",
                           "kv_connector_module_path": "dejakv.engines.vllm.connector",
                           "kv_role": "kv_both",
                           "kv_connector_extra_config": {"store": "/var/lib/dejakv"}}'
"""

import logging
import math
from collections.abc import Iterable, Mapping
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

from dejakv import tracing
from dejakv.blend.sentences import sentence_ends
from dejakv.cache import HierarchicalCache
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.bind import (
    EXTENSION,
    bound_runner,
    warn_unless_budgeted,
    watched_model,
)
from dejakv.engines.vllm.blend.blend import BlendRunner
from dejakv.engines.vllm.blend.names import ApproximateNames, is_approximate
from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
from dejakv.engines.vllm.blend.rows import RowForward
from dejakv.engines.vllm.device import STAGE_BYTES
from dejakv.engines.vllm.events import OWNER, BlockChain, StoreEvents
from dejakv.engines.vllm.generations import UNCLEAN, WeightsWatch
from dejakv.engines.vllm.identity import LoraAdapters, server_epoch
from dejakv.engines.vllm.lookups import LookupRunner
from dejakv.engines.vllm.messages import StepPlan, StepReport
from dejakv.engines.vllm.pages import PagedKV
from dejakv.engines.vllm.ranks import ALONE, RankGroup, is_apart, rank_count, settings_of_rank
from dejakv.engines.vllm.recurrent.boundaries import unserved
from dejakv.engines.vllm.recurrent.states import StatePages
from dejakv.engines.vllm.refusals import refuse_beside_others, refuse_unsupported
from dejakv.engines.vllm.request import ConnectorCounts
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.stats import DejaKVPromMetrics, DejaKVStats
from dejakv.engines.vllm.stores import EveryRank, open_store
from dejakv.engines.vllm.transfers.saves import SaveLimits
from dejakv.engines.vllm.worker import WorkerSide
from dejakv.errors import ConfigError
from dejakv.identity import BLOCK_TOKENS, epoch_of
from dejakv.store.base import OUTAGES

log = logging.getLogger("dejakv.vllm")

NO_RECURRENT_BLEND = (
    "blend is not for recurrent layers: their state stands for all tokens before it, in their order"
)
"""Reason for computing exactly where a blend was asked for."""

_RUNTIME = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING lets other weights be loaded behind an adapter's id: unset "
    "it for reuse"
)


def make_scheduler_side(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, counts: ConnectorCounts
) -> SchedulerSide:
    """Create the scheduler side with its store, lookups and limits.

    Raises
    ------
    ConfigError, StoreError, MissingExtraError
        A setting does not fit, the store cannot be opened, or a package is missing.
    """
    base_epoch = server_epoch(vllm_config, kv_cache_config)
    if upstream.is_batch_invariant() and settings.generated_text == "keep":
        # Decoded state must not reach a server that calls its hits bit for bit equal.
        base_epoch = epoch_of({"server": base_epoch, "generated_text": "keep"})
    adapters = LoraAdapters(
        base_epoch,
        upstream.adapters_applied(vllm_config),
        _RUNTIME if upstream.adapters_change_at_runtime() else "",
        upstream.adapters_leak(vllm_config),
    )

    ranks = rank_count(vllm_config)
    stores = [
        open_store(settings_of_rank(settings, rank, ranks), vllm_config) for rank in range(ranks)
    ]
    store = stores[0] if ranks == 1 else EveryRank(stores)
    config = settings.cache_config()
    recurrent = upstream.recurrent_groups(kv_cache_config)
    lookups = LookupRunner(
        HierarchicalCache(store, config=config),
        settings,
        adapters,
        upstream.block_tokens(kv_cache_config) if recurrent else 0,
    )

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
        recurrent_groups=recurrent,
        max_tokens=budget,
        ranks=ranks,
        save_limits=save_room(settings_of_rank(settings, 0, ranks), kv_cache_config),
        arithmetic=upstream.arithmetic(vllm_config),
        # What decoding computed is loaded too: nobody has compared its bits.
        bitwise=upstream.is_batch_invariant() and settings.generated_text == "off",
        whole_only=upstream.decodes_alone_behind(vllm_config),
        draft_tokens=upstream.draft_tokens(vllm_config),
        events=make_events(vllm_config, kv_cache_config, settings),
    )


def make_events(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings
) -> StoreEvents | None:
    """Create the KV events of the store; None if vLLM publishes none, or these are not possible."""
    if not upstream.publishes_events(vllm_config):
        return None

    why = ""
    if len(kv_cache_config.kv_cache_groups) > 1:
        why = "models with several KV cache groups have none yet"
    elif not upstream.is_tested():
        why = "this version of vLLM was not tested with them"
    if why:
        log.warning("no KV events of the store: %s", why)
        return None

    tokens = upstream.block_tokens(kv_cache_config)
    stride = tokens // upstream.hash_block_tokens(kv_cache_config)
    tier = {"medium": "STORAGE" if settings.store else "CPU", "owner": OWNER}

    def chain_of(request: Any, blocks: int) -> BlockChain:
        lora = request.lora_request
        hashes = tuple(request.block_hashes[stride - 1 : blocks * stride : stride])
        extra_keys = upstream.event_extra_keys(request, len(hashes), tokens)
        return BlockChain(
            hashes,
            tuple(request.all_token_ids[: len(hashes) * tokens]),
            tuple(extra_keys) if extra_keys else None,
            {
                "lora_id": lora.adapter_id if lora else None,
                "lora_name": lora.name if lora else None,
            },
        )

    return StoreEvents(
        tokens,
        chain_of,
        partial(upstream.stored_event, kv_cache_config, **tier),
        partial(upstream.removed_event, **tier),
    )


def save_room(settings: ConnectorSettings, kv_cache_config: Any) -> SaveLimits:
    """Return the limits of one rank's saves, in tokens."""
    # Settings are in bytes, and the scheduler counts tokens.
    token_bytes = upstream.bytes_per_token(kv_cache_config)
    # An increment must begin where vLLM's blocks and the store's index both have a border.
    unit = math.lcm(upstream.block_tokens(kv_cache_config), BLOCK_TOKENS)
    max_stored_tokens = max(1, settings.max_bytes // token_bytes) if settings.max_bytes else 0
    drops = upstream.drops_blocks(kv_cache_config)
    return SaveLimits(
        settings.max_pending_bytes // token_bytes,
        unit,
        max_stored_tokens,
        drops,
        upstream.is_stepped_by_hand(),
        upstream.state_bytes(kv_cache_config) // token_bytes,
    )


def make_worker_side(
    vllm_config: Any, settings: ConnectorSettings, paged: PagedKV, *, blends: bool
) -> WorkerSide:
    """Create the worker side: the store to write to, the watch of the weights and the blends.

    Raises
    ------
    ConfigError, StoreError, ModelError
        A setting does not fit, the store cannot be opened, or the model cannot blend.
    """
    if not paged.copies.is_host:
        warn_unless_budgeted(vllm_config)

    settings = settings_of_rank(settings, upstream.rank(), rank_count(vllm_config))
    weights_watch = WeightsWatch.for_model(watched_model(vllm_config))
    # Before the store is opened, so that an error leaves nothing open.
    blend_runner = blender_for(vllm_config, settings, paged) if blends else None
    store = open_store(settings, vllm_config, writing=True)
    return WorkerSide(
        store,
        paged,
        blend_runner,
        weights_watch,
        settings.load_timeout_s,
        settings.max_pending_bytes,
        settings.pinned_bytes,
    )


def blender_for(vllm_config: Any, settings: ConnectorSettings, paged: PagedKV) -> BlendRunner:
    """Create the blend runner of the worker's model.

    Raises
    ------
    ConfigError
        The model runner is not known, since the server runs without the worker extension.
    ModelError
        Keys of this model cannot be moved.
    """
    runner = bound_runner(vllm_config)
    if runner is None:
        raise ConfigError(
            "blend computes with the served model and needs to be given it: add "
            f"--worker-extension-cls {EXTENSION}"
        )

    model = runner.get_model()
    # Wrapped layers would add the adapters of vLLM's next step to the blend's rows.
    if vllm_config.lora_config is not None:
        model = upstream.without_adapters(model)

    rotary = LayerRotaryTables.from_model(model, list(paged.layers.values()))
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
    """KV connector of vLLM that stores prompts' state and reuses it, exactly or in blends.

    vLLM creates one instance in the scheduler and one in each worker. The docstrings below say what
    is special here, and `KVConnectorBase_V1` documents each method.

    Raises
    ------
    ConfigError
        At the start: a setting or a feature of the server is not supported.
    StoreError
        At the start: the store cannot be used.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = ConnectorSettings.from_extra(
            self._kv_transfer_config.kv_connector_extra_config
        )

        # Of a version that was not tested with blends, exact reuse still runs.
        no_blend = upstream.usable("blend" if self.settings.may_blend else "exact")
        if upstream.recurrent_groups(kv_cache_config):
            no_blend = NO_RECURRENT_BLEND
        self._blends = self.settings.may_blend and not no_blend
        # In such a server the connector does nothing.
        self._unserved = unserved(vllm_config, kv_cache_config)
        if self._unserved:
            log.warning("every prompt is computed in full: %s", self._unserved)
        else:
            refuse_unsupported(vllm_config, kv_cache_config, self.settings)
        refuse_beside_others(
            vllm_config, upstream.engine_transfer(), self.settings, DejaKVConnector
        )

        self._counts = ConnectorCounts()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            tracing.start()
            # vLLM's default fails a request whose state cannot be read. Below
            # MultiConnector the engine's own setting counts (`refuse_beside_others`).
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            self._scheduler = make_scheduler_side(
                vllm_config, kv_cache_config, self.settings, self._counts
            )
            self._scheduler.no_blend, self._scheduler.no_reuse = no_blend, self._unserved
            # Other versions are not checked at the start for what this wraps. Steps of recurrent
            # layers stay vLLM's, which end with blocks: in bf16 others round otherwise.
            if upstream.is_tested() and not upstream.recurrent_groups(kv_cache_config):
                upstream.leave_room(upstream.calling_scheduler(), self._scheduler.share_step)

    @classmethod
    def bytes_beside_cache(cls, vllm_config: Any, extra: Mapping[str, Any]) -> int:
        """Return how many bytes of a GPU one rank takes beside the KV cache.

        These are the stages for copies and, where blends are possible, the state that they start
        from.
        """
        ranks = rank_count(vllm_config)
        settings = settings_of_rank(ConnectorSettings.from_extra(extra), 0, ranks)
        blends = settings.may_blend and upstream.is_tested()
        return 2 * STAGE_BYTES + (settings.max_pending_bytes if blends else 0)

    # Scheduler side

    @property
    def scheduler_side(self) -> SchedulerSide:
        """Scheduler side of this connector; only the instance in the scheduler has it."""
        assert self._scheduler is not None
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Hide blended blocks from KV events, and let lookups see vLLM's prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._blends:
            # Whoever reads the events would take these blocks for exact ones.
            upstream.hide_events(kv_cache_manager, is_approximate)

        if self.scheduler_side.events is not None:
            upstream.watch_clears(kv_cache_manager, self.scheduler_side.events.cleared)

        # `upstream.is_cached` calls vLLM's internal block pool, which another version may change.
        if upstream.is_tested():
            self.scheduler_side.names.is_cached = partial(upstream.is_cached, kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """Start the lookup of a request."""
        self.scheduler_side.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens to load, or None while the lookup runs.

        Loads are always asynchronous. A call has side effects: it may rename the request's blocks,
        and it counts the lookup.
        """
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load that `get_num_new_matched_tokens` promised."""
        if num_external_tokens > 0:
            self.scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the worker's orders for this step."""
        manager = self._kv_cache_manager
        assert manager is not None
        return self.scheduler_side.plan_step(scheduler_output, manager.get_block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the worker's report of a step."""
        # None without news; that the step is over counts nevertheless.
        report = connector_output.kv_connector_worker_meta
        self.scheduler_side.process_report(
            report if isinstance(report, StepReport) else StepReport()
        )

    def take_events(self) -> Iterable[Any]:
        """Return the KV events of the store since the last call."""
        events = self.scheduler_side.events
        return () if events is None else events.take()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request whose KV cache has a single group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request.

        Returns
        -------
        bool
            True while a save still copies from its blocks, so that vLLM must not free them.
        dict or None
            `kv_transfer_params` for the client, under `dejakv`.
        """
        blocks_wait, response_params = self.scheduler_side.finished(request, block_ids)

        return blocks_wait, response_params or None

    def reset_cache(self) -> bool:
        """Begin a generation of weights, since a reset may follow a change of them.

        Returns
        -------
        bool
            False if vLLM's own prefix cache still holds what was computed before the reset. Nothing
            is stored or used until a reset finds no block in use.
        """
        clean = upstream.prefix_cache_is_empty(self._kv_cache_manager)
        if not clean:
            log.warning("the reset was not whole, so nothing is stored or reused: %s", UNCLEAN)
        self.scheduler_side.reset("" if clean else UNCLEAN)
        return clean

    # Worker side

    @property
    def worker_side(self) -> WorkerSide:
        """Worker side of this connector, from `register_kv_caches` on."""
        assert self._worker is not None
        return self._worker

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Create the worker side for these caches; their layout is checked by writing to them."""
        if self._unserved:
            return
        layers = upstream.attention_layers(self._vllm_config, kv_caches)
        kv = self._kv_cache_config
        dtype = self._vllm_config.model_config.dtype
        groups = upstream.groups_of(kv)

        recurrent = upstream.recurrent_groups(kv)
        state_caches = {
            name: cache for name, cache in kv_caches.items() if groups[name] in recurrent
        }
        states = StatePages(state_caches, groups, kv.num_blocks) if state_caches else None

        paged = PagedKV(
            layers,
            {name: cache for name, cache in kv_caches.items() if name not in state_caches},
            upstream.block_tokens(kv),
            kv.num_blocks,
            dtype,
            groups,
            entries=self._blends,
            states=states,
        )
        self._worker = make_worker_side(
            self._vllm_config, self.settings, paged, blends=self._blends
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Check the weights, and start to read the state of this step's loads."""
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: a load is over before its request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole pages are copied behind a step (`SaveLimits.at_once`)."""

    def wait_for_save(self) -> None:
        """Copy the state of this step's saves; a thread stores it later."""
        if self._worker is not None:
            self._worker.copy_saves(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Put arrived state into its blocks, compute rows of blends, and return what has ended."""
        if self._worker is None:
            return KVConnectorTransferResults(set(), set(), set())
        released, over, failed = self._worker.finish(self._plan())
        return KVConnectorTransferResults(released, over, failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the worker's news for the scheduler side, or None without any."""
        return None if self._worker is None else self._worker.report()

    # Both

    def get_kv_connector_stats(self) -> DejaKVStats | None:
        """Return the counters since the last call, or None without any."""
        # Worker sides see the same outages, which must count once.
        if self._scheduler is not None:
            store_stats = self._scheduler.lookups.cache.store.stats(content=False)
            self._counts.absent({name: getattr(store_stats, name) for name in OUTAGES})

        stats = DejaKVStats(self._counts.take())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Close both sides; the worker stores what is pending as far as time allows."""
        if self._scheduler is not None:
            self._scheduler.close()
            tracing.stop()
        if self._worker is not None:
            # A worker in a process of its own is killed soon after vLLM stops.
            self._worker.close(upstream.seconds_to_stop() if is_apart(self._vllm_config) else 30.0)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DejaKVStats:
        """Wrap counters that crossed a process."""
        return DejaKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> DejaKVPromMetrics:
        """Create the connector's series on `/metrics`."""
        return DejaKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


upstream.register(DejaKVConnector)

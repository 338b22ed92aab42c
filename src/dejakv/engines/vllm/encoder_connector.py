# pyright: reportMissingImports=false
"""`DejaKVEncoderConnector`: encoder outputs over the encoder registry, beyond vLLM's own encoder cache and over restarts.

    --ec-transfer-config '{"ec_connector": "DejaKVEncoderConnector",
                           "ec_connector_module_path": "dejakv.engines.vllm.encoder_connector",
                           "ec_role": "ec_both",
                           "ec_connector_extra_config": {"store": "/var/lib/dejakv-encoder"}}'

Only byte-identical input of the encoder shares an output. A similar picture never stands in for another one here: vLLM files
outputs and prefix blocks under the medium's identifier, so an approximate output would be served as exact from then on.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cachetools import FIFOCache
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from dejakv.config import switched_off
from dejakv.encoder_cache import EncoderView, VisualKVCache
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.bind import watched_model
from dejakv.engines.vllm.generations import WeightGenerations, WeightsWatch
from dejakv.engines.vllm.identity import AnonymousMedia, media_digest, partition_of, server_epoch
from dejakv.engines.vllm.ranks import is_apart, rank_count
from dejakv.engines.vllm.settings import EncoderSettings, choices_in
from dejakv.errors import ConfigError

REMEMBERED = 10_000
MOST_SAVES = 64
"""Outputs that wait to be filed."""


@dataclass(frozen=True)
class MediumLookup:
    """One medium of one request: the key of its output, and the output if it was found."""

    epoch: str
    digest: str
    partition: str
    modality: str
    embedding: Any = None


class EncoderFinder:
    """Finds stored outputs for vLLM's requests, in threads. Used in the engine loop alone.

    view_of    gives a partition's view of the registry in one epoch
    epoch      of the outputs to find and to file; `reset` changes it
    timeout_s  a lookup that takes longer is a miss
    """

    def __init__(self, view_of: Callable[[str, str], EncoderView], epoch: str, timeout_s: float) -> None:
        self._view_of = view_of
        self._epoch = epoch
        self._timeout = timeout_s
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dejakv-media")
        self._lookups: dict[tuple[str, int], tuple[Future[MediumLookup | None] | None, float]] = {}
        self._sights: FIFOCache[str, MediumLookup | None] = FIFOCache(REMEMBERED)
        self._looked_at: set[str] = set()

    def ready(self, request: Any) -> bool:
        """Start the lookups of a request's media; True when each has ended or is late. `sight` then answers for this request."""
        self._looked_at = set()
        if _switched_off(request):
            return True
        done, unknown = True, set[str]()
        partition = partition_of(request.cache_salt)

        for index, feature in enumerate(request.mm_features):
            if feature.data is None or (request.lora_request is not None and feature.identifier != feature.mm_hash):
                unknown.add(feature.identifier)
                continue  # no pixels to know it by, or an output that an adapter has changed
            # By request, since vLLM asks again until all its lookups have ended.
            key = (request.request_id, index)
            if key not in self._lookups:
                future = self._pool.submit(self._look, self._epoch, feature.data, feature.modality, partition)
                self._lookups[key] = (future, time.monotonic() + self._timeout)
            future, deadline = self._lookups[key]
            if future is None:
                continue
            if future.done():
                self._note(feature.identifier, future.result())
                # Ended and noted: later calls pass over it.
                self._lookups[key] = (None, deadline)
                continue
            unknown.add(feature.identifier)
            # Past the deadline the medium counts as unknown, and is encoded.
            if time.monotonic() < deadline:
                done = False
        # Identifiers can be the client's choice, so no answer is given for the others.
        self._looked_at = {feature.identifier for feature in request.mm_features} - unknown
        return done

    def sight(self, identifier: str) -> MediumLookup | None:
        """The lookup's result for a medium of the request last given to `ready`; None if unknown, not looked up, or if its identifier has
        stood for two contents or two partitions."""
        return self._sights.get(identifier) if identifier in self._looked_at else None

    def reset(self, epoch: str) -> None:
        """Use another epoch: outputs found before are not used."""
        self._epoch = epoch
        self._sights.clear()
        self._lookups.clear()

    def forget(self, request: Any) -> None:
        """Drop the lookups of a finished request."""
        for index, feature in enumerate(request.mm_features):
            self._lookups.pop((request.request_id, index), None)
            self.used(feature.identifier)
            if keeps_nothing(request):
                self._sights.pop(feature.identifier, None)

    def used(self, identifier: str) -> None:
        """Release an output that the worker has by now."""
        medium_lookup = self._sights.get(identifier)
        if medium_lookup is not None and medium_lookup.embedding is not None:
            # From now on only the key is needed.
            self._sights[identifier] = replace(medium_lookup, embedding=None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self, epoch: str, data: Any, modality: str, partition: str) -> MediumLookup | None:
        """None for a medium whose content is not at hand."""
        try:
            digest = media_digest(data)
        except AnonymousMedia:
            return None
        try:
            block = self._view_of(epoch, partition).lookup(digest, modality)
        except Exception:  # a registry that fails costs an encoder run
            block = None
        return MediumLookup(epoch, digest, partition, modality, block.embedding if block is not None else None)

    def _note(self, identifier: str, medium_lookup: MediumLookup | None) -> None:
        previous = self._sights.get(identifier, medium_lookup)
        # An identifier that stood for two contents or two tenants serves neither.
        if (
            previous is None
            or medium_lookup is None
            or (previous.digest, previous.partition) != (medium_lookup.digest, medium_lookup.partition)
        ):
            self._sights[identifier] = None
        else:
            self._sights[identifier] = medium_lookup


def keeps_nothing(request: Any) -> bool:
    """Whether a request asks for `kv_transfer_params.dejakv.no_store`; True for unreadable parameters."""
    choices = choices_in(request.kv_transfer_params)
    return choices is not None and (not isinstance(choices, dict) or choices.get("no_store", False) is not False)


def _switched_off(request: Any) -> bool:
    """Whether `ec_transfer_params.dejakv.mode` of a request is `off`; any other value changes nothing."""
    choices = choices_in(request.ec_transfer_params)
    return isinstance(choices, dict) and choices.get("mode") == "off"


@dataclass
class EncoderOrders(ECConnectorMetadata):
    """Scheduler to worker: outputs to use, by identifier; places for computed ones; and the generation of weights of both."""

    load: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    file: dict[str, MediumLookup] = field(default_factory=dict[str, MediumLookup])
    generation: int = 0


@dataclass
class EncoderReport(ECConnectorWorkerMetadata):
    """Worker to scheduler: generations with whether their weights are those of the start, and whether a change was noticed."""

    weights: list[tuple[int, bool]]
    changed: bool

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "EncoderReport":
        assert isinstance(other, EncoderReport)
        return EncoderReport(self.weights + other.weights, self.changed or other.changed)


_registries: dict[str, tuple[VisualKVCache, set[int]]] = {}
"""Registries of this process by vLLM's engine id, one for a server's scheduler and worker side, and the `id` of each connector that uses it;
the last of them closes it."""


_managers: dict[str, "CountingManager"] = {}
"""vLLM's managers of its encoder cache in this process, by engine id."""


class CountingManager(EncoderCacheManager):
    """Counts vLLM's resets of its encoder cache, at updates of weights (vllm-project/vllm#33452); connectors are not told."""

    resets = 0

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> "CountingManager":
        manager = cls(cache_size)
        _managers[str(vllm_config.ec_transfer_config.engine_id)] = manager
        return manager

    def reset(self) -> None:
        super().reset()
        self.resets += 1


def count_resets(vllm_config: Any) -> None:
    """Put that manager into vLLM's setting, which the scheduler reads after it made the connector. Raises: ConfigError if another one is
    set."""
    setting, ours = vllm_config.ec_manager_config, f"{__name__}.{CountingManager.__name__}"
    if vllm_config.model_config.is_encoder_decoder or setting.encoder_cache_manager_cls not in (None, ours):
        raise ConfigError(
            "resets of the encoder cache would not be noticed: DejaKVEncoderConnector runs with vLLM's own manager of that"
            " cache, so leave --ec-manager-config out, and with no encoder-decoder model"
        )
    setting.encoder_cache_manager_cls = ours


class DejaKVEncoderConnector(ECConnectorBase):
    """Reuses encoder outputs. Raises, at start: ConfigError for settings that do not fit or an unsupported vLLM."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        upstream.usable("pictures")
        transfer = vllm_config.ec_transfer_config
        if transfer.ec_role != "ec_both":
            raise ConfigError(f"ec_role={transfer.ec_role!r}: this connector both saves and loads, give ec_both")
        self.settings = EncoderSettings.from_extra(transfer.ec_connector_extra_config)

        self._off = bool(switched_off())
        self._engine_id = str(transfer.engine_id)
        if self.settings.store is None and is_apart(vllm_config):
            raise ConfigError(
                "the worker is a process of its own here, and would keep outputs that no lookup sees: give a store"
            )
        # Scheduler side and worker side of one process must see the same outputs.
        if self._engine_id not in _registries:
            _registries[self._engine_id] = self.settings.open(), set()

        registry, users = _registries[self._engine_id]
        users.add(id(self))
        self._view_of = registry.view
        self._generations = WeightGenerations(server_epoch(vllm_config), rank_count(vllm_config))
        self._finder = EncoderFinder(self._view_of, self._generations.epoch, self.settings.lookup_timeout_s)

        self._watch = WeightsWatch(None)
        self._orders = EncoderOrders()
        self.encoded = 0
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="dejakv-encoder-save")
        self._saves: list[Future[None]] = []
        self._resets = 0
        if role == ECConnectorRole.SCHEDULER:
            count_resets(vllm_config)

    # Scheduler side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        self._notice_reset()
        return self._off or self._finder.ready(request)  # what was not looked for is neither used nor filed

    def has_cache_item(self, identifier: str) -> bool:
        medium_lookup = self._finder.sight(identifier)
        return medium_lookup is not None and medium_lookup.embedding is not None

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        identifier = request.mm_features[index].identifier
        medium_lookup = self._finder.sight(identifier)
        if medium_lookup is None:
            return
        if medium_lookup.embedding is not None:
            self._orders.load[identifier] = medium_lookup.embedding
            # The order holds the tensor from here on.
            self._finder.used(identifier)
        elif not keeps_nothing(request):
            self._orders.file[identifier] = medium_lookup

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        self._notice_reset()  # a step without media tells the worker too
        orders, self._orders = self._orders, EncoderOrders()
        orders.generation = self._generations.number
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.ec_connector_worker_meta
        if not isinstance(report, EncoderReport):
            return

        before = self._generations.epoch
        for number, same in report.weights:
            self._generations.heard(number, same)
        if report.changed:
            self._begin_generation()
        elif before != self._generations.epoch:
            self._finder.reset(self._generations.epoch)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._finder.forget(request)
        return False, None

    def _notice_reset(self) -> None:
        resets = _managers[self._engine_id].resets
        if self._resets != resets:
            self._resets = resets
            self._begin_generation()

    def _begin_generation(self) -> None:
        """Drop earlier finds, since the weights may have changed."""
        self._generations.begin()
        self._finder.reset(self._generations.epoch)

    # Worker side

    def start_worker_services(self) -> None:
        self._watch = WeightsWatch.of(watched_model(self._vllm_config))

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        device = self._vllm_config.device_config.device
        orders = self._get_orders()
        self._watch.step(orders.generation, computing=False, using=bool(orders.load or orders.file))
        for identifier, embedding in orders.load.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = torch.as_tensor(embedding).to(device)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        self.encoded += 1
        medium_lookup = self._get_orders().file.get(mm_hash)
        if medium_lookup is None or self._watch.problem:
            return
        # Each waiting save holds an output in memory, so their number is bounded.
        self._saves = [save for save in self._saves if not save.done()]
        if len(self._saves) == MOST_SAVES:
            return  # the registry is slower than the encoder: this output is computed again some day
        # Copied now, since vLLM may evict the output before the thread runs.
        output = encoder_cache[mm_hash].detach().to("cpu", copy=True)
        self._saves.append(self._saving.submit(self._keep, medium_lookup, output))

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        weights, changed = self._watch.take()
        return EncoderReport(weights, changed) if weights or changed else None

    def flush(self) -> None:
        """Wait until all outputs computed so far are filed."""
        wait(self._saves)

    def shutdown(self) -> None:
        # Queued outputs are filed before the registry closes.
        self._saving.shutdown(wait=True)
        self._finder.close()

        registry, users = _registries.get(self._engine_id, (None, set[int]()))
        users.discard(id(self))
        if registry is not None and not users:
            registry.close()
            del _registries[self._engine_id]
            _managers.pop(self._engine_id, None)

    def _get_orders(self) -> EncoderOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, EncoderOrders)
        return orders

    def _keep(self, medium_lookup: MediumLookup, output: torch.Tensor) -> None:
        with suppress(Exception):  # a full or damaged registry costs another encoder run, nothing else
            self._view_of(medium_lookup.epoch, medium_lookup.partition).store(
                medium_lookup.digest, medium_lookup.modality, output
            )

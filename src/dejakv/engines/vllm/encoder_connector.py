# pyright: reportMissingImports=false
"""`DejaKVEncoderConnector`: encoder outputs beyond vLLM's own encoder cache and over restarts.

    --ec-transfer-config '{"ec_connector": "DejaKVEncoderConnector",
                           "ec_connector_module_path": "dejakv.engines.vllm.encoder_connector",
                           "ec_role": "ec_both",
                           "ec_connector_extra_config": {"store": "/var/lib/dejakv-encoder"}}'

Only byte-identical input of the encoder shares an output. A similar picture never stands in for
another one here: vLLM files outputs and prefix blocks under the medium's identifier, so an
approximate output would be served as exact from then on.
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

MAX_REMEMBERED = 10_000
MAX_SAVES = 64
"""Maximum number of outputs that wait to be filed."""


@dataclass(frozen=True)
class MediumLookup:
    """Key of one medium's encoder output, and the output if it is in the registry."""

    epoch: str
    digest: str
    partition: str
    modality: str
    embedding: Any = None


class EncoderFinder:
    """Finds stored outputs for vLLM's requests, in threads. Used in the engine loop alone.

    Parameters
    ----------
    view_of : Callable[[str, str], EncoderView]
        Gives the view of a partition on the registry in one epoch.
    epoch : str
        Epoch of the outputs to find and to file; `reset` changes it.
    timeout_s : float
        Seconds after which a lookup is a miss.
    """

    def __init__(
        self, view_of: Callable[[str, str], EncoderView], epoch: str, timeout_s: float
    ) -> None:
        self._view_of = view_of
        self._epoch = epoch
        self._timeout = timeout_s
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dejakv-media")
        self._lookups: dict[tuple[str, int], tuple[Future[MediumLookup | None] | None, float]] = {}
        self._medium_lookups: FIFOCache[str, MediumLookup | None] = FIFOCache(MAX_REMEMBERED)
        self._looked_at: set[str] = set()

    def ready(self, request: Any) -> bool:
        """Start the lookups of a request's media; return whether each has ended or is late.

        `sight` then answers for this request.
        """
        self._looked_at = set()
        if _switched_off(request):
            return True
        done, unknown = True, set[str]()
        partition = partition_of(request.cache_salt)

        for index, feature in enumerate(request.mm_features):
            if feature.data is None or (
                request.lora_request is not None and feature.identifier != feature.mm_hash
            ):
                # No pixels to know it by, or an output that an adapter has changed.
                unknown.add(feature.identifier)
                continue
            # By request, since vLLM asks again until all its lookups have ended.
            key = (request.request_id, index)
            if key not in self._lookups:
                future = self._pool.submit(
                    self._look, self._epoch, feature.data, feature.modality, partition
                )
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
        """Return the lookup of a medium of the request last given to `ready`.

        Returns
        -------
        MediumLookup or None
            None if it is unknown or was not looked up, or if its identifier has stood for two
            contents or two partitions.
        """
        return self._medium_lookups.get(identifier) if identifier in self._looked_at else None

    def reset(self, epoch: str) -> None:
        """Look for outputs of `epoch` from now on, and drop all lookups of the epoch before."""
        self._epoch = epoch
        self._medium_lookups.clear()
        self._lookups.clear()

    def forget(self, request: Any) -> None:
        """Drop the lookups of a finished request."""
        for index, feature in enumerate(request.mm_features):
            self._lookups.pop((request.request_id, index), None)
            self.used(feature.identifier)
            if keeps_nothing(request):
                self._medium_lookups.pop(feature.identifier, None)

    def used(self, identifier: str) -> None:
        """Release an output that the worker has by now."""
        medium_lookup = self._medium_lookups.get(identifier)
        if medium_lookup is not None and medium_lookup.embedding is not None:
            # From now on only the key is needed.
            self._medium_lookups[identifier] = replace(medium_lookup, embedding=None)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self, epoch: str, data: Any, modality: str, partition: str) -> MediumLookup | None:
        """Look for a medium's output, in a thread; None if its content is not at hand."""
        try:
            digest = media_digest(data)
        except AnonymousMedia:
            return None
        try:
            block = self._view_of(epoch, partition).lookup(digest, modality)
        except Exception:
            # A registry that fails costs an encoder run.
            block = None

        # The epoch is part of it: a reset may come before the output is filed.
        return MediumLookup(
            epoch, digest, partition, modality, block.embedding if block is not None else None
        )

    def _note(self, identifier: str, medium_lookup: MediumLookup | None) -> None:
        previous = self._medium_lookups.get(identifier, medium_lookup)
        # An identifier that stood for two contents or two tenants serves neither.
        if (
            previous is None
            or medium_lookup is None
            or (previous.digest, previous.partition)
            != (medium_lookup.digest, medium_lookup.partition)
        ):
            self._medium_lookups[identifier] = None
        else:
            self._medium_lookups[identifier] = medium_lookup


def keeps_nothing(request: Any) -> bool:
    """Tell whether a request asks for `no_store` in `kv_transfer_params.dejakv`.

    Unreadable parameters may have asked for it, so they count as such.
    """
    choices = choices_in(request.kv_transfer_params)
    return choices is not None and (
        not isinstance(choices, dict) or choices.get("no_store", False) is not False
    )


def _switched_off(request: Any) -> bool:
    """Tell whether a request's `ec_transfer_params.dejakv.mode` is `off`; no other value counts."""
    choices = choices_in(request.ec_transfer_params)
    return isinstance(choices, dict) and choices.get("mode") == "off"


@dataclass
class EncoderOrders(ECConnectorMetadata):
    """Message from the scheduler to the worker, once in each step.

    Attributes
    ----------
    load : dict[str, Tensor]
        Outputs to use, by identifier.
    file : dict[str, MediumLookup]
        Keys under which computed outputs are stored, by identifier.
    weights_generation : int
        Generation of the weights of both.
    """

    load: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    file: dict[str, MediumLookup] = field(default_factory=dict[str, MediumLookup])
    weights_generation: int = 0


@dataclass
class EncoderReport(ECConnectorWorkerMetadata):
    """Message from the worker to the scheduler.

    Attributes
    ----------
    weights : list[tuple[int, bool]]
        Generations, each with whether its weights are those of the start.
    changed : bool
        A change of the weights was noticed.
    """

    weights: list[tuple[int, bool]]
    changed: bool

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "EncoderReport":
        """Join the reports of two ranks."""
        assert isinstance(other, EncoderReport)
        return EncoderReport(self.weights + other.weights, self.changed or other.changed)


_registries: dict[str, tuple[VisualKVCache, set[int]]] = {}
"""Registries of this process by vLLM's engine id, each with the `id` of its connectors.

Scheduler side and worker side of a server share one; the last connector closes it."""


_managers: dict[str, "CountingManager"] = {}
"""vLLM's managers of its encoder cache in this process, by engine id."""


class CountingManager(EncoderCacheManager):
    """Counts vLLM's resets of its encoder cache, at updates of weights (vllm-project/vllm#33452).

    vLLM does not tell connectors about them.
    """

    resets = 0

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> "CountingManager":
        """Create the manager and note it for the connector of its engine."""
        manager = cls(cache_size)
        _managers[str(vllm_config.ec_transfer_config.engine_id)] = manager

        return manager

    def reset(self) -> None:
        """Reset the cache and count."""
        super().reset()
        self.resets += 1


def install_counting_manager(vllm_config: Any) -> None:
    """Let vLLM's scheduler create a `CountingManager`, after it has created the connector.

    Raises
    ------
    ConfigError
        Another manager is set, or the model is an encoder-decoder model.
    """
    setting, ours = vllm_config.ec_manager_config, f"{__name__}.{CountingManager.__name__}"
    if vllm_config.model_config.is_encoder_decoder or setting.encoder_cache_manager_cls not in (
        None,
        ours,
    ):
        raise ConfigError(
            "resets of the encoder cache would not be noticed: DejaKVEncoderConnector runs with "
            "vLLM's own manager of that"
            " cache, so leave --ec-manager-config out, and with no encoder-decoder model"
        )
    setting.encoder_cache_manager_cls = ours


class DejaKVEncoderConnector(ECConnectorBase):
    """Encoder-cache connector of vLLM that stores encoder outputs and reuses them.

    The docstrings below say what is special here, and `ECConnectorBase` documents each method.

    Raises
    ------
    ConfigError
        At the start: settings do not fit, or this vLLM is not supported.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        upstream.usable("pictures")

        transfer = vllm_config.ec_transfer_config
        if transfer.ec_role != "ec_both":
            raise ConfigError(
                f"ec_role={transfer.ec_role!r}: this connector both saves and loads, give ec_both"
            )

        self.settings = EncoderSettings.from_extra(transfer.ec_connector_extra_config)

        self._off = bool(switched_off())
        self._engine_id = str(transfer.engine_id)
        if self.settings.store is None and is_apart(vllm_config):
            raise ConfigError(
                "the worker is a process of its own here, and would keep outputs that no lookup "
                "sees: give a store"
            )
        # Scheduler side and worker side of one process must see the same outputs.
        if self._engine_id not in _registries:
            _registries[self._engine_id] = self.settings.open(), set()

        registry, users = _registries[self._engine_id]
        users.add(id(self))
        self._view_of = registry.view
        self._generations = WeightGenerations(server_epoch(vllm_config), rank_count(vllm_config))
        self._finder = EncoderFinder(
            self._view_of, self._generations.epoch, self.settings.lookup_timeout_s
        )

        self._weights_watch = WeightsWatch(None)
        self._orders = EncoderOrders()
        self.encoded = 0
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="dejakv-encoder-save")
        self._saves: list[Future[None]] = []

        self._resets = 0

        if role == ECConnectorRole.SCHEDULER:
            install_counting_manager(vllm_config)

    # Scheduler side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Start the lookups of a request's media; return whether they have ended."""
        self._notice_reset()
        # Switched off, nothing is looked for, so that nothing is used or filed.
        return self._off or self._finder.ready(request)

    def has_cache_item(self, identifier: str) -> bool:
        """Tell whether the registry has the output of this medium."""
        medium_lookup = self._finder.sight(identifier)
        return medium_lookup is not None and medium_lookup.embedding is not None

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Order the use of a stored output, or the storage of one that will be computed."""
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
        """Return the worker's orders for this step."""
        # In every step, since a step without media tells the worker about a reset too.
        self._notice_reset()
        orders, self._orders = self._orders, EncoderOrders()
        orders.weights_generation = self._generations.number
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the worker's report about its weights."""
        report = connector_output.ec_connector_worker_meta
        if not isinstance(report, EncoderReport):
            return

        before = self._generations.epoch
        for number, same in report.weights:
            self._generations.record_answer(number, same)
        if report.changed:
            self._begin_generation()
        elif before != self._generations.epoch:
            self._finder.reset(self._generations.epoch)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Drop the lookups of a finished request; nothing is sent asynchronously."""
        self._finder.forget(request)
        return False, None

    def _notice_reset(self) -> None:
        resets = _managers[self._engine_id].resets
        if self._resets != resets:
            self._resets = resets
            self._begin_generation()

    def _begin_generation(self) -> None:
        """Drop earlier lookups, since the weights may have changed."""
        self._generations.begin()
        self._finder.reset(self._generations.epoch)

    # Worker side

    def start_worker_services(self) -> None:
        """Begin to watch the weights, once the worker has loaded the model."""
        self._weights_watch = WeightsWatch.for_model(watched_model(self._vllm_config))

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Check the weights, and put stored outputs into vLLM's encoder cache."""
        device = self._vllm_config.device_config.device
        orders = self._get_orders()
        self._weights_watch.step(
            orders.weights_generation, computing=False, using=bool(orders.load or orders.file)
        )
        # Outputs are used in this very step.
        self._weights_watch.settle()

        for identifier, embedding in orders.load.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = torch.as_tensor(embedding).to(device)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Copy a computed output, for a thread to store."""
        self.encoded += 1

        medium_lookup = self._get_orders().file.get(mm_hash)
        if medium_lookup is None or self._weights_watch.problem:
            return

        # Each waiting save holds an output in memory, so their number is bounded.
        self._saves = [save for save in self._saves if not save.done()]
        if len(self._saves) == MAX_SAVES:
            # The registry is slower than the encoder: this output will be computed again.
            return

        # Copied now, since vLLM may evict the output before the thread runs.
        output = encoder_cache[mm_hash].detach().to("cpu", copy=True)
        self._saves.append(self._saving.submit(self._keep, medium_lookup, output))

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """Return the worker's news about its weights, or None without any."""
        weights, changed = self._weights_watch.take_news()
        return EncoderReport(weights, changed) if weights or changed else None

    def flush(self) -> None:
        """Wait until all outputs computed so far are filed."""
        wait(self._saves)

    def shutdown(self) -> None:
        """Save the queued encoder outputs; an engine's last connector closes the registry."""
        # Queued outputs are filed before the registry closes.
        self._saving.shutdown(wait=True)
        self._finder.close()

        registry, users = _registries.get(self._engine_id, (None, set[int]()))
        # A second call finds no registry.
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
        # A full or damaged registry costs another encoder run, nothing else.
        with suppress(Exception):
            self._view_of(medium_lookup.epoch, medium_lookup.partition).store(
                medium_lookup.digest, medium_lookup.modality, output
            )

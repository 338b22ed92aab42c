"""The store behind a connector. Scheduler side and worker side each open it; on disk they share the folder."""

import threading
from typing import Any

from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError
from dejakv.store.admission import Admission
from dejakv.store.open import open_store as open_folder
from dejakv.store.open import store_of
from dejakv.store.store import Budget, Store


class _Shared(Store):
    """A store in memory that both sides of one connector hold: it is emptied when the last of them closes it."""

    def __init__(self, settings: ConnectorSettings, rules: Admission) -> None:
        super().__init__(budget=Budget(settings.max_bytes, policy=settings.policy), admission=rules)
        self.holders = 0

    def close(self) -> None:
        self.holders -= 1
        if self.holders <= 0:
            super().close()


class MemoryStores:
    """The stores in memory of this process, by vLLM's engine id."""

    def __init__(self) -> None:
        self._stores: dict[str, _Shared] = {}
        self._lock = threading.Lock()

    def open(self, engine_id: str, settings: ConnectorSettings, rules: Admission) -> Store:
        with self._lock:
            store = self._stores.get(engine_id)
            if store is None or store.holders <= 0:
                store = self._stores[engine_id] = _Shared(settings, rules)
            store.holders += 1
            return store


_memory = MemoryStores()


def open_store(settings: ConnectorSettings, vllm_config: Any, *, writing: bool = False) -> Store:
    """The store that the settings name. The side that is writing applies the rules of admission and keeps some of what is on
    disk in memory too.

    Raises: StoreError if the folder cannot be used, ConfigError if a store in memory would be another one in the worker.
    """
    config = settings.cache_config()
    if config.cache_dir is not None:
        # Most prompts are never asked for again: only what is read is worth a place in memory.
        if writing:
            return store_of(config, memory_fill="read")
        return open_folder(config.cache_dir, max_bytes=settings.max_bytes, policy=settings.policy)
    if vllm_config.parallel_config.distributed_executor_backend not in (None, "uni"):
        raise ConfigError("the worker is a process of its own here, so the store must be on disk: set store_dir")
    rules = Admission(0, config.second_sight, config.max_write_rate)
    return _memory.open(vllm_config.kv_transfer_config.engine_id, settings, rules)

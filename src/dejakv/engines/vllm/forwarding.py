# pyright: reportMissingImports=false
"""The part of vLLM's connector interface that DejaKV has no use for itself: all of it goes to the wrapped connector."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from dejakv.engines.vllm.inner import Inner, inner_class


class Forwarding(KVConnectorBase_V1):
    """Base of `DejaKVConnector`. Without a wrapped connector each method does what vLLM's own base class does."""

    _inner: Inner | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """A save of ours that does not happen is a later miss, nothing more."""
        return self._inner is not None and self._inner.connector.requires_kv_delivery

    # Both sides

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        inner = inner_class(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return None if inner is None else inner.get_required_kvcache_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        inner = inner_class(extra_config)
        if inner is None:
            return False
        return inner.requires_piecewise_for_cudagraph(extra_config["inner"].get("kv_connector_extra_config", {}))

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._inner is not None:
            self._inner.connector.bind_gpu_block_pool(gpu_block_pool)

    def take_events(self) -> Iterable[Any]:
        return () if self._inner is None else self._inner.connector.take_events()

    def has_pending_block_frees(self) -> bool:
        return self._inner is not None and self._inner.connector.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self._inner is not None and self._inner.connector.has_pending_push_work()

    def get_finished_count(self) -> int | None:
        return None if self._inner is None else self._inner.connector.get_finished_count()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if self._inner is not None:
            self._inner.connector.set_xfer_handshake_metadata(metadata)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """By tier: the wrapped connector's, where it loads the request's state."""
        if self._inner is not None and self._inner.loads(request.request_id):
            return self._inner.connector.get_external_cache_hit_sources(request, num_external_tokens)
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    # Worker side

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return None if self._inner is None else self._inner.connector.get_mem_pool_context()

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        if self._inner is not None:
            self._inner.connector.set_host_xfer_buffer_ops(copy_operation)

    def finish_forward(self) -> None:
        if self._inner is not None:
            self._inner.connector.finish_forward()

    def reset_capture_state(self) -> None:
        if self._inner is not None:
            self._inner.connector.reset_capture_state()

    def get_kv_connector_kv_cache_events(self) -> Any:
        return None if self._inner is None else self._inner.connector.get_kv_connector_kv_cache_events()

    def get_handshake_metadata(self) -> Any:
        return None if self._inner is None else self._inner.connector.get_handshake_metadata()

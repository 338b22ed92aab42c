"""Access of the connector's worker side to the model runner, through vLLM's worker extension.

    --worker-extension-cls dejakv.engines.vllm.bind.WorkerExtension

vLLM adds the class to the bases of its worker and creates the worker. `__new__` then notes the
worker, and the connector, created later in the same process, finds the model runner behind it
without a remote call. Blends compute with the model runner and need the extension. Watching the
weights needs it only where the worker that hands out the KV cache is not on the call stack
(`upstream.calling_worker`). On a GPU the extension also keeps memory free for the connector.
"""

import logging
import weakref
from collections.abc import Iterator
from typing import Any

from dejakv.engines.vllm import upstream
from dejakv.errors import ConfigError

log = logging.getLogger("dejakv.vllm")

EXTENSION = "dejakv.engines.vllm.bind.WorkerExtension"

_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()


class WorkerExtension:
    """Base class that vLLM mixes into its worker; it adds and changes no method.

    vLLM creates connectors when it has profiled its memory and given all that was left to the KV
    cache. A worker on a GPU notes at its start how many bytes vLLM may use, in an attribute that
    its class does not have. Here it is a property, which takes off what the connector will need.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        """Create the worker and note it for `bound_runner`."""
        # A weak reference, so that a worker ends when vLLM drops it.
        worker = object.__new__(cls)
        _workers.add(worker)
        return worker

    @property
    def requested_memory(self) -> int:
        """Bytes of the GPU that vLLM may use, less those of the connector."""
        return self.__dict__["requested_memory"]

    @requested_memory.setter
    def requested_memory(self, nbytes: int) -> None:
        beside = bytes_beside_cache(self.__dict__["vllm_config"])
        if beside:
            log.info("%d MiB of the GPU's memory are left to the connector", beside >> 20)
        self.__dict__["requested_memory"] = nbytes - beside


def bytes_beside_cache(vllm_config: Any) -> int:
    """Return how many bytes of a GPU one rank's connector takes beside the KV cache."""
    transfer = vllm_config.kv_transfer_config
    # Connectors of vLLM's own do not tell.
    return sum(
        connector.bytes_beside_cache(vllm_config, extra)
        for connector, extra in (upstream.connectors_of(transfer) if transfer else ())
        if hasattr(connector, "bytes_beside_cache")
    )


def warn_unless_budgeted(vllm_config: Any) -> None:
    """Log what to do where vLLM's budget of a GPU's memory leaves no room for the connector."""
    # The worker notes its budget before it loads the model, long before it creates a connector.
    if not any("requested_memory" in vars(worker) for worker in _bound_workers(vllm_config)):
        log.warning(
            "vLLM's budget of the GPU's memory lacks %d MiB that the connector takes: add "
            "--worker-extension-cls %s, or lower --gpu-memory-utilization",
            bytes_beside_cache(vllm_config) >> 20,
            EXTENSION,
        )


def bound_runner(vllm_config: Any) -> Any | None:
    """Return the model runner of this process's worker, or None without the extension."""
    worker = next(_bound_workers(vllm_config), None)
    return getattr(worker, "model_runner", None)


def _bound_workers(vllm_config: Any) -> Iterator[Any]:
    """Yield this process's worker, if it has the extension.

    A connector below MultiConnector has a copy of the worker's configuration. The copy shares its
    parts, so the worker is recognized by its model configuration.
    """
    # A copy, since the garbage collector may shrink the set meanwhile.
    for worker in list(_workers):
        config = getattr(worker, "vllm_config", None)
        if config is not None and config.model_config is vllm_config.model_config:
            yield worker


def watched_model(vllm_config: Any) -> Any | None:
    """Return the served model, and the one that drafts tokens, whose weights are to be watched.

    Returns
    -------
    torch.nn.Module or None
        None if vLLM shows no worker.

    Raises
    ------
    ConfigError
        The server was started for updates of weights, and they cannot be watched.
    """
    runner = bound_runner(vllm_config)
    worker = upstream.calling_worker() if runner is None else None
    if runner is None and worker is None and vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            "weights that are updated while the server runs need to be watched: add "
            f"--worker-extension-cls {EXTENSION}"
        )

    shown = worker if runner is None else runner
    return None if shown is None else upstream.models_of(shown)

"""Access of the connector's worker side to the model runner, through vLLM's worker extension.

    --worker-extension-cls dejakv.engines.vllm.bind.WorkerExtension

vLLM adds the class to the bases of its worker and creates the worker. `__new__` then notes the
worker, and the connector, created later in the same process, finds the model runner behind it
without a remote call. Blends compute with the model runner and need the extension. Watching the
weights needs it only where the worker that hands out the KV cache is not on the call stack
(`upstream.calling_worker`).
"""

import weakref
from typing import Any

from dejakv.engines.vllm import upstream
from dejakv.errors import ConfigError

EXTENSION = "dejakv.engines.vllm.bind.WorkerExtension"

_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()


class WorkerExtension:
    """Base class that vLLM mixes into its worker; it adds and changes no method."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        """Create the worker and note it for `bound_runner`."""
        # A weak reference, so that a worker ends when vLLM drops it.
        worker = object.__new__(cls)
        _workers.add(worker)
        return worker


def bound_runner(vllm_config: Any) -> Any | None:
    """Return the model runner of this process's worker, or None without the extension.

    A connector below MultiConnector has a copy of the worker's configuration. The copy shares its
    parts, so the worker is recognized by its model configuration.
    """
    # A copy, since the garbage collector may shrink the set meanwhile.
    for worker in list(_workers):
        config = getattr(worker, "vllm_config", None)
        if config is not None and config.model_config is vllm_config.model_config:
            return getattr(worker, "model_runner", None)
    return None


def watched_model(vllm_config: Any) -> Any | None:
    """Return the served model, whose weights are to be watched.

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

    if runner is not None:
        return runner.get_model()
    return None if worker is None else worker.get_model()

"""How the connector's worker side gets at the model runner: a worker extension, vLLM's own seam, without a remote call.

    --worker-extension-cls dejakv.engines.vllm.bind.WorkerExtension

vLLM adds the class to its worker's bases and makes the worker; `__new__` then notes the worker, and the connector, which is
made later in the same process, finds the model runner behind it. Blends compute with it, and need this seam. To watch the weights the
worker that is handing out the KV cache will do (`upstream.calling_worker`), so that each server's are watched.
"""

import weakref
from typing import Any

from dejakv.engines.vllm import upstream
from dejakv.errors import ConfigError

EXTENSION = "dejakv.engines.vllm.bind.WorkerExtension"

_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()


class WorkerExtension:
    """Adds no method to the worker and changes none."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        worker = object.__new__(cls)
        _workers.add(worker)
        return worker


def bound_runner(vllm_config: Any) -> Any | None:
    """The model runner of the worker of this process; None without the extension. A connector below MultiConnector has a copy of
    the worker's configuration, with the same parts."""
    # A copy, since the garbage collector may shrink the set meanwhile.
    for worker in list(_workers):
        config = getattr(worker, "vllm_config", None)
        if config is not None and config.model_config is vllm_config.model_config:
            return getattr(worker, "model_runner", None)
    return None


def watched_model(vllm_config: Any) -> Any | None:
    """The served model, to watch its weights; None if vLLM shows no worker. Raises: ConfigError if the server was started for updates of
    weights and they cannot be watched."""
    runner = bound_runner(vllm_config)
    worker = upstream.calling_worker() if runner is None else None
    if runner is None and worker is None and vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            f"weights that are updated while the server runs need to be watched: add --worker-extension-cls {EXTENSION}"
        )

    if runner is not None:
        return runner.get_model()
    return None if worker is None else worker.get_model()

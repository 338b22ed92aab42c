"""How the connector's worker side gets at the model runner: a worker extension, vLLM's own seam, without a remote call.

    --worker-extension-cls dejakv.engines.vllm.bind.WorkerExtension

vLLM adds the class to its worker's bases and makes the worker; `__new__` then notes the worker, and the connector, which is
made later in the same process, finds the model runner behind it.
"""

import weakref
from typing import Any

from dejakv.errors import ConfigError

EXTENSION = "dejakv.engines.vllm.bind.WorkerExtension"

_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()


class WorkerExtension:
    """Adds no method to the worker and changes none."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        worker = object.__new__(cls)
        _workers.add(worker)
        return worker


def bound_runner(vllm_config: Any) -> Any:
    """The model runner of the worker of this process. Raises ConfigError if the extension was not given."""
    for worker in list(_workers):
        if getattr(worker, "vllm_config", None) is vllm_config and getattr(worker, "model_runner", None) is not None:
            return worker.model_runner
    raise ConfigError(
        f"blend computes with the served model and needs to be given it: add --worker-extension-cls {EXTENSION}"
    )

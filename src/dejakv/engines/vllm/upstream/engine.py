# pyright: reportMissingImports=false
"""vLLM's engine around a connector: its scheduler, worker, ranks and connectors."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from dejakv.errors import ConfigError

log = logging.getLogger("dejakv.vllm")


def calling_scheduler() -> Any:
    """Return the scheduler that is creating this connector, whose budget leaves room to blends.

    Raises
    ------
    ConfigError
        No scheduler is on the call stack.
    """
    from vllm.v1.core.sched.interface import SchedulerInterface

    scheduler = _caller(SchedulerInterface)
    if scheduler is None:
        raise ConfigError("no scheduler makes this connector: blend runs in vLLM's engine alone")
    return scheduler


def calling_worker() -> Any | None:
    """Return the worker that is creating this connector or handing it the KV cache, if any."""
    from vllm.v1.worker.worker_base import WorkerBase

    return _caller(WorkerBase)


def is_stepped_by_hand() -> bool:
    """Tell whether the calling program makes the steps of the engine that is being created.

    It does for an `LLM` with `VLLM_ENABLE_V1_MULTIPROCESSING=0`, which makes no step while no
    request is unanswered.
    """
    from vllm.v1.engine.core_client import InprocClient

    return _caller(InprocClient) is not None


def seconds_to_stop() -> float:
    """Return how long a worker in a process of its own may store when vLLM stops.

    The worker gets these seconds, one more, and then SIGKILL (`v1/executor/multiproc_executor.py`).
    """
    from vllm import envs

    return float(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + 3)


def _caller(kind: type) -> Any | None:
    """Return the nearest object of this kind among those whose methods are running.

    vLLM hands a connector neither its scheduler nor its worker.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back

    return None


def connectors_of(transfer: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return all connectors that KV transfer settings name: their classes and extra settings.

    Those below (nested) MultiConnectors are among them (`v1/multi_connector.py`).
    """
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # MultiConnector holds the settings of its connectors as plain dictionaries.
    extra = transfer.kv_connector_extra_config
    below = extra.get("connectors") or ()
    children = [each for child in below for each in connectors_of(KVTransferConfig(**child))]
    return [(KVConnectorFactory.get_connector_class(transfer), extra), *children]


def engine_transfer() -> Any | None:
    """Return the engine's KV transfer settings while it creates a worker's connector.

    They are known below MultiConnector too; elsewhere they are None (`v1/worker/worker_base.py`).
    """
    from vllm.config import get_current_vllm_config_or_none

    engine = get_current_vllm_config_or_none()
    return None if engine is None else engine.kv_transfer_config


def leave_room(scheduler: Any, room: Callable[[], tuple[int, int]]) -> None:
    """Let each call of `schedule` leave tokens of its budget free.

    The budget and the limit for one prompt are attributes that `schedule` copies first of all
    (`v1/core/sched/scheduler.py`). Both are restored after the call, whatever was raised.

    The method of one scheduler is wrapped, and no class given for `--scheduler-cls`. Users would
    have to name that class, one for synchronous and one for asynchronous scheduling, and vLLM
    promises the base classes as little. Both change the same attributes.

    Parameters
    ----------
    scheduler : vllm.v1.core.sched.scheduler.Scheduler
        vLLM's scheduler.
    room : Callable[[], tuple[int, int]]
        Gives the tokens to leave free, and the maximum tokens of one prompt (0: vLLM's own limit).
    """
    schedule, config = scheduler.schedule, scheduler.scheduler_config

    def schedule_with_room(*args: Any, **kwargs: Any) -> Any:
        budget = scheduler.max_num_scheduled_tokens
        prompt_limit = config.long_prefill_token_threshold
        free, longest = room()
        scheduler.max_num_scheduled_tokens = max(0, budget - free)
        # 0 means no limit, so it must not be the minimum.
        config.long_prefill_token_threshold = min(filter(None, (longest, prompt_limit)), default=0)

        try:
            return schedule(*args, **kwargs)
        finally:
            scheduler.max_num_scheduled_tokens = budget
            config.long_prefill_token_threshold = prompt_limit

    scheduler.schedule = schedule_with_room


def register(connector: type) -> None:
    """Make a connector known by its name.

    MultiConnector looks up the classes of statistics by name (`v1/multi_connector.py`), and an
    unknown one ends the server.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(
            connector.__name__, connector.__module__, connector.__name__
        )

    except ValueError:
        log.debug("%s is registered already", connector.__name__)


def ranks_group() -> Any:
    """Return the process group of the tensor-parallel ranks, for tensors in host memory."""
    from vllm.distributed import get_tp_group

    return get_tp_group().cpu_group


def rank() -> int:
    """Return this worker's tensor-parallel rank.

    The process groups exist before the connector does (`v1/worker/gpu_worker.py`).
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def connector_of(llm: Any) -> Any:
    """Return the scheduler's connector of an offline `LLM` in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def has_work(llm: Any) -> bool:
    """Tell whether an offline `LLM` in this process has requests or orders left.

    Orders are those of the connector to its worker.
    """
    return llm.llm_engine.engine_core.engine_core.scheduler.has_requests()

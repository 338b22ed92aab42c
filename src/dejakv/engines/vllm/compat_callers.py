# pyright: reportMissingImports=false
"""The part of `compat` that finds objects of vLLM's which nothing hands to a connector: their methods wait for it to be made."""

import inspect
from collections.abc import Callable
from typing import Any

from dejakv.errors import ConfigError


def calling_scheduler() -> Any:
    """The scheduler that is making this connector. A connector that wraps others, such as vLLM's MultiConnector, hands them
    a copy of the configuration, so that nothing else leads to it. Raises ConfigError."""
    from vllm.v1.core.sched.interface import SchedulerInterface

    scheduler = _caller(lambda item: isinstance(item, SchedulerInterface))
    if scheduler is None:
        raise ConfigError("no scheduler makes this connector: it runs in vLLM's engine, alone or in a MultiConnector")
    return scheduler


def calling_model() -> Any:
    """The model of the runner that is calling the worker's connector; None if there is none."""
    runner = _caller(lambda item: hasattr(item, "model_config") and callable(getattr(item, "get_model", None)))
    return None if runner is None else runner.get_model()


def _caller(wanted: Callable[[Any], bool]) -> Any:
    """The nearest object whose method waits for this call to return and that is wanted."""
    frame = inspect.currentframe()
    while frame is not None:
        item = frame.f_locals.get("self")
        if item is not None and wanted(item):
            return item
        frame = frame.f_back
    return None

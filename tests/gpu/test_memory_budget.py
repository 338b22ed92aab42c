"""What vLLM's worker on a GPU leaves to the connector, by its own code: from its start to the KV cache, which takes all that profiling left."""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.gpu.pretended import pretended
from vllm.config import KVTransferConfig
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from dejakv.engines.vllm.bind import EXTENSION, warn_unless_budgeted
from dejakv.engines.vllm.device import CudaCopies

MIB = 1 << 20
TOTAL, OTHERS, WEIGHTS, ACTIVATIONS = 8192 * MIB, 300 * MIB, 2048 * MIB, 500 * MIB
UTILIZATION = 0.9
CONNECTOR = {"kv_connector": "DejaKVConnector", "kv_connector_module_path": "dejakv.engines.vllm.connector", "kv_role": "kv_both"}  # fmt: skip
PENDING = 1024 * MIB
BLEND = {**CONNECTOR, "kv_connector_extra_config": {"mode": "blend", "max_pending_bytes": PENDING}}
BELOW = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [CONNECTOR]},
}
OTHER = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "/nowhere"},
}


class Accelerator:
    """In the place of `torch.accelerator`: how much of the GPU's memory is taken, and torch's peak."""

    def __init__(self) -> None:
        self.others, self.torch, self.peak = OTHERS, 0, 0

    def take(self, nbytes: int) -> None:
        self.torch += nbytes
        self.peak = max(self.peak, self.torch)

    def get_memory_info(self, *_: Any) -> tuple[int, int]:
        return TOTAL - self.others - self.torch, TOTAL

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.peak, "allocated_bytes.all.current": self.torch}

    def memory_reserved(self, *_: Any) -> int:
        return self.torch

    def reset_peak_memory_stats(self, *_: Any) -> None:
        self.peak = self.torch

    def device_count(self) -> int:
        return 1

    def nothing(self, *_: Any) -> None:
        pass

    empty_cache = set_device_index = synchronize = nothing


class Runner:
    """In the place of vLLM's model runner: its profile takes activations, and frees them."""

    model_memory_usage = WEIGHTS

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def load_model(self, **_: Any) -> None:
        self.accelerator.take(WEIGHTS)

    def profile_run(self, **_: Any) -> None:
        self.accelerator.take(ACTIVATIONS)
        self.accelerator.take(-ACTIVATIONS)


@contextmanager
def vllm_worker(config: Any, transfer: dict[str, Any], *, extended: bool) -> Generator[tuple[Any, Accelerator]]:
    """vLLM's worker, behind its profile, without what needs CUDA."""
    accelerator = Accelerator()

    class GpuWorker(gpu_worker.Worker):
        def _make_model_runner(self) -> Any:
            return Runner(accelerator)

    changed = copy.copy(config)
    changed.cache_config = copy.copy(config.cache_config)
    changed.cache_config.gpu_memory_utilization, changed.cache_config.kv_cache_memory_bytes = UTILIZATION, None
    changed.parallel_config = copy.copy(config.parallel_config)
    changed.parallel_config.worker_cls, changed.parallel_config.worker_extension_cls = "worker", EXTENSION * extended
    changed.device_config = SimpleNamespace(device_type="cuda", device=torch.device("cuda:0"))
    changed.kv_transfer_config = KVTransferConfig(**transfer)

    from vllm.v1.worker import worker_base

    resolve = worker_base.resolve_obj_by_qualname
    platform = gpu_worker.current_platform
    with (
        patch.object(worker_base, "resolve_obj_by_qualname", lambda name: GpuWorker if name == "worker" else resolve(name)),
        patch.object(torch, "accelerator", accelerator),
        patch.object(gpu_worker, "init_worker_distributed_environment"),
        patch.object(gpu_worker, "init_workspace_manager"),
        patch.object(gpu_worker, "report_usage_stats"),
        patch.object(gpu_worker, "set_torch_threads_for_runtime"),
        patch.object(type(platform), "check_if_supports_dtype", create=True),
        patch.object(type(platform), "current_device", lambda *_: "cuda:0", create=True),
        # Of a CPU: a search of all modules, which some that other tests import do not survive.
        patch.object(type(platform), "register_triton_kernel_overrides", lambda *_: None),
    ):  # fmt: skip
        wrapper = WorkerWrapperBase()
        wrapper.init_worker(
            [
                {
                    "vllm_config": changed,
                    "local_rank": 0,
                    "rank": 0,
                    "distributed_init_method": "",
                    "is_driver_worker": True,
                }
            ]
        )
        wrapper.init_device()
        wrapper.load_model()
        yield wrapper, accelerator


SERVERS = {"exact": (CONNECTOR, 0), "blend": (BLEND, PENDING), "below MultiConnector": (BELOW, 0)}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("extended", [True, False])
def test_vllms_budget_holds_with_the_connectors_memory_where_it_has_the_extension(
    config: Any, server: str, extended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without, more is taken than vLLM may use, and the log says so; the difference is what the connector takes, so nothing is left unused either."""
    transfer, pending = SERVERS[server]
    with vllm_worker(config, transfer, extended=extended) as (worker, memory):
        memory.take(worker.determine_available_memory())
        warn_unless_budgeted(worker.vllm_config)
    # What the worker side takes as it starts, and the state of blends up to its limit.
    with pretended() as gpu:
        copies = CudaCopies(gpu.device)
        copies.reserve(MIB)
        beside = gpu.take().empty + pending
        copies.close()
    memory.take(beside)

    # vLLM keeps as much free as activations take at their peak.
    above = memory.torch + ACTIVATIONS - TOTAL * UTILIZATION
    assert above == pytest.approx(0 if extended else beside, abs=MIB)
    assert beside == 256 * MIB + pending
    assert (f"lacks {beside // MIB} MiB that the connector takes: add" in caplog.text) != extended


def test_another_connector_leaves_vllms_budget_as_it_is(config: Any) -> None:
    with vllm_worker(config, OTHER, extended=True) as (worker, memory):
        memory.take(worker.determine_available_memory())
    assert memory.torch + ACTIVATIONS == pytest.approx(TOTAL * UTILIZATION, abs=MIB)

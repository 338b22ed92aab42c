"""The fused copy of donors' state: the kernel, in Triton's interpreter, gives what operations of torch give, whatever the layout."""

import importlib
import logging
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from research.gpu.fused_cases import CASES, Case, copied, difference, rotary_tables
from tests.gpu import worker
from tests.gpu.pretended import pretended
from tests.gpu.worker import blend_order, emulated_kernel, started

from dejakv.engines.vllm.blend import fused
from dejakv.engines.vllm.blend.fused import FusedCopy
from dejakv.engines.vllm.blend.model import LayerRotaryTables
from dejakv.engines.vllm.blend.row_memory import rotary_layout
from dejakv.engines.vllm.pages import PagedKV


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    pytest.importorskip("triton", reason="Triton is not installed, whose interpreter runs the kernel on a CPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = "dejakv.engines.vllm.blend.kernels"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    # Compiled for a GPU is what others import.
    sys.modules.pop(name, None)


def by_torch(paged: PagedKV, rotary: LayerRotaryTables, source: Any, target: Any, slots: Any) -> None:
    FusedCopy(paged, rotary).copy(source, target, slots)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_kernel_gives_what_torch_gives(triton_kernels: Any, case: Case) -> None:
    def by_kernel(paged: PagedKV, rotary: LayerRotaryTables, source: Any, target: Any, slots: Any) -> None:
        assert source.steps is not None
        assert target.steps is not None
        triton_kernels.copy_rows(source, target, torch.from_numpy(slots), rotary_layout(rotary, case.width))

    assert not difference(copied(by_kernel, case), copied(by_torch, case))


@pytest.mark.parametrize("change", [{}, {"BY_LAYER": False, "NEOX": False, "HEADS": 3, "HEADS_2": 4, "WIDTH": 80}])
def test_the_kernel_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any]) -> None:
    """To a program of an H100, which takes no GPU."""
    pytest.importorskip("triton", reason="Triton is not installed, which compiles the kernel")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = importlib.import_module("dejakv.engines.vllm.blend.kernels").rows_kernel
    sizes = {
        "R_BLOCK": 16,
        "R_GROUP": 16,
        "R_PACK": 128,
        "W_BLOCK": 16,
        "W_GROUP": 16,
        "W_PACK": 128,
        "HEADS": 8,
        "HEADS_2": 8,
    }
    sizes |= {"WIDTH": 128, "WIDTH_2": 128, "HALF": 32, "HALF_2": 32, "NEOX": True, "BY_LAYER": True} | change
    pointers = dict.fromkeys(("source", "target", "table"), "*bf16")
    pointers |= dict.fromkeys(("target_bases", "table_bases", "index"), "*i64")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else pointers.get(name, "i64") for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_steps_in_memory_lead_to_the_same_rows(case: Case) -> None:
    """By a program that reads and writes at addresses, as the kernel does."""

    def by_address(paged: PagedKV, rotary: LayerRotaryTables, source: Any, target: Any, slots: Any) -> None:
        emulated_kernel(None)(source, target, torch.from_numpy(slots), rotary_layout(rotary, case.width))

    for half, wanted in zip(copied(by_address, case), copied(by_torch, case), strict=True):
        assert torch.equal(half, wanted)


def broken(*_: Any) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("why", "kernel"),
    [(fused.FAILED, lambda: broken), (fused.NO_TRITON, broken), (fused.WRONG, lambda: lambda *_: None)],
)
def test_without_a_kernel_blends_go_on_and_one_line_says_so(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str, kernel: Any
) -> None:
    blends = []
    caplog.set_level(logging.WARNING, "dejakv.vllm")
    for faulty in (False, True):
        with pretended(1) as gpu:
            if faulty:
                monkeypatch.setattr(worker, "emulated_kernel", lambda _: kernel())
            server, metas, target = started(config, 2, 320, 2, gpu)
            order, table, stop = blend_order(server, metas, target)
            assert not server.load(order).problem
            blends.append(server.state(table, stop))
            assert server.fallbacks == ([why] if faulty else [])
            server.close()
    assert torch.equal(*blends)
    assert len([record for record in caplog.records if "operations of torch" in record.message]) == 1


def test_layouts_that_the_kernel_does_not_know_are_left_to_torch() -> None:
    rotary, other = (rotary_tables(CASES[0]._replace(turned=turned), torch.device("cpu")) for turned in (64, 32))
    mixed = LayerRotaryTables([rotary.tables[0], other.tables[1], rotary.tables[2]])
    assert rotary_layout(rotary, 64) is not None
    assert rotary_layout(mixed, 64) is None

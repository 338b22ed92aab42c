"""The fused copy of donors' state: the kernel, in Triton's interpreter, gives what operations of torch give, whatever the layout."""

import importlib
import logging
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from research.gpu.fused_cases import (
    CASES,
    Case,
    copied,
    correct_by_torch,
    corrected_rows,
    difference,
    relative_error,
    rotary_tables,
)  # fmt: skip
from tests.gpu import worker
from tests.gpu.pretended import pretended
from tests.gpu.worker import blend_order, emulated_kernels, started

from dejakv.engines.vllm.blend import fused
from dejakv.engines.vllm.blend.correction_table import TILE
from dejakv.engines.vllm.blend.fused import FusedCopy, Kernels
from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
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


def correcting(kernels: Kernels) -> Any:
    def correct(paged: PagedKV, state: Any, key: Any, value: Any, rows: Any, moves: Any, slots: Any) -> None:
        way = FusedCopy(paged, LayerRotaryTables([]))
        way._kernels = kernels
        way.correct(1, key, value, rows, state, way.correction_table(moves, slots))

    return correct


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_kernel_corrects_rows_as_torch_does(triton_kernels: Any, case: Case) -> None:
    wanted = corrected_rows(correct_by_torch, case)
    assert all(bool(part.any()) for part in wanted)
    # The interpreter cuts off what 16 bits cannot hold.
    limit = 4 * torch.finfo(case.dtype).eps
    for kernels in (triton_kernels, emulated_kernels(None)):
        for half, expected in zip(corrected_rows(correcting(kernels), case), wanted, strict=True):
            assert relative_error(half, expected) <= limit


def test_no_number_that_varies_is_compiled_into_a_kernel() -> None:
    """Or one that 16 divides would be compiled for, while requests wait. Where a head's width is a multiple of 16 all steps are."""
    pytest.importorskip("triton", reason="Triton is not installed, which compiles the kernels")
    kernels = importlib.import_module("dejakv.engines.vllm.blend.kernels")
    for kernel, fixed in (
        (kernels.rows_kernel_any, {"r_number", "w_number"}),
        (kernels.offsets_kernel_any, {"w_pack", "w_number"}),
    ):
        numbers = {
            param.name for param in kernel.params if not param.is_constexpr and param.name.endswith(("_step", "_head"))
        }
        numbers |= {param.name for param in kernel.params if param.name.startswith(("r_", "w_"))}
        assert {param.name for param in kernel.params if param.name in numbers and not param.do_not_specialize} <= fixed
    assert "layer" in {param.name for param in kernels.offsets_kernel.params if param.do_not_specialize}


@pytest.mark.parametrize("change", [{}, {"BY_LAYER": False, "NEOX": False, "HEADS": 3, "HEADS_2": 4, "WIDTH": 80}])
def test_the_kernel_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any]) -> None:
    """To a program of an H100, which takes no GPU."""
    pytest.importorskip("triton", reason="Triton is not installed, which compiles the kernel")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = importlib.import_module("dejakv.engines.vllm.blend.kernels")
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
    sizes |= {"ROWS": TILE, "COLUMNS": 32}
    pointers = dict.fromkeys(("source", "target", "table", "key", "value"), "*bf16") | {"weights": "*fp32"}
    numbers = ("target_bases", "table_bases", "index", "rows", "tiles", "rest", "slots", "anchors", "places")
    for kernel in (kernels.rows_kernel, kernels.offsets_kernel):
        names = kernel.arg_names
        kinds = pointers | dict.fromkeys(numbers, "*i64") | ({"rows": "i64"} if kernel is kernels.rows_kernel else {})
        signature = {name: "constexpr" if name in sizes else kinds.get(name, "i64") for name in names}
        constants = {(names.index(name),): value for name, value in sizes.items() if name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_steps_in_memory_lead_to_the_same_rows(case: Case) -> None:
    """By a program that reads and writes at addresses, as the kernel does."""

    def by_address(paged: PagedKV, rotary: LayerRotaryTables, source: Any, target: Any, slots: Any) -> None:
        emulated_kernels(None).copy_rows(source, target, torch.from_numpy(slots), rotary_layout(rotary, case.width))

    for half, wanted in zip(copied(by_address, case), copied(by_torch, case), strict=True):
        assert torch.equal(half, wanted)


def broken(*_: Any) -> None:
    raise RuntimeError("no compiler")


def idle(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("why", "kernels"),
    [
        (fused.FAILED, lambda _: Kernels(broken, broken)),
        (fused.NO_TRITON, broken),
        (fused.WRONG, lambda _: Kernels(idle, idle)),
        (fused.WRONG, lambda gpu: emulated_kernels(gpu)._replace(correct_rows=idle)),
    ],
)
def test_without_a_kernel_blends_go_on_and_one_line_says_so(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str, kernels: Any
) -> None:
    blends = []
    caplog.set_level(logging.WARNING, "dejakv.vllm")
    for faulty in (False, True):
        with pretended(1) as gpu:
            if faulty:
                monkeypatch.setattr(worker, "emulated_kernels", kernels)
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

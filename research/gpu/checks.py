"""Whether DejaKV is right on a device, without vLLM: each check returns what it saw, or raises."""

from collections.abc import Callable
from unittest.mock import patch

import torch

import dejakv
from dejakv.config import SemanticCacheConfig
from research.gpu import vllm_names
from research.gpu.models import SMALL, random_llama, tokenizer, words

# The worker side is imported behind them.
vllm_names.provide()

from tests.gpu.worker import Server, blend_order, prompts, started  # noqa: E402

from dejakv.engines.vllm.blend import fused  # noqa: E402
from dejakv.engines.vllm.blend.fused import FusedCopy  # noqa: E402
from dejakv.engines.vllm.blend.row_memory import rotary_layout  # noqa: E402
from dejakv.engines.vllm.messages import LoadOrder  # noqa: E402
from research.gpu.fused_cases import (  # noqa: E402
    CASES,
    Case,
    copied,
    correct_by_torch,
    corrected_rows,
    difference,
    relative_error,
    rotary_tables,
)

ROUNDS, PROMPTS = 12, 2
BUSY_CYCLES = 20_000_000
"""Cycles for which the GPU is kept busy in front of a copy, so that the copy is late."""


class NotRun(Exception):
    """A check cannot run on this device; the message is why."""


class Wrong(Exception):
    """A check failed."""


def no_kernel() -> None:
    raise ImportError("left out here")


def fused_copies(device: torch.device) -> str:
    """The kernels of blends against operations of torch, in layouts of KV caches."""
    if device.type != "cuda":
        raise NotRun("the kernel is for GPUs; tests run it in Triton's interpreter")
    kernel = fused.triton_kernels().copy_rows
    for case in CASES:

        def by_kernel(paged, rotary, source, target, slots, case: Case = case) -> None:
            index = torch.from_numpy(slots.copy()).to(device)
            kernel(source, target, index, rotary_layout(rotary, case.width))

        def by_torch(paged, rotary, source, target, slots) -> None:
            with patch.object(fused, "triton_kernels", no_kernel):
                FusedCopy(paged, rotary).copy(source, target, slots)

        wrong = difference(*(copied(way, case, device, 50) for way in (by_kernel, by_torch)))
        if wrong:
            raise Wrong(f"{case}: {wrong}")

        def correct(paged, state, key, value, rows, moves, slots, case: Case = case) -> None:
            way = FusedCopy(paged, rotary_tables(case, device))
            table = way.correction_table(moves, slots)
            if table is None:
                raise Wrong(f"{case}: {way.take_fallbacks()[0]}")
            way.correct(1, key, value, rows, state, table)

        ways = (corrected_rows(each, case, device) for each in (correct, correct_by_torch))
        wrong = max(relative_error(*parts) for parts in zip(*ways, strict=True))
        # Sums in another order, then rounded.
        if not wrong <= 4 * torch.finfo(case.dtype).eps:
            raise Wrong(f"{case}, offsets: a relative error of {wrong:.2g}")
    return f"{len(CASES)} layouts: V bit for bit, K but for the last bit; offsets as well"


def saves_and_hits(device: torch.device) -> str:
    """Late saves and exact hits of vLLM's worker side, whose blocks are used again at once."""
    server = Server(vllm_names.engine_config(), 2, 64, device=device)
    for seed in range(ROUNDS):
        ids = prompts(120, 1, seed)[0][0]
        table, other = server.compute(ids), server.blocks(len(ids))
        before = server.state(table, len(ids) - 1)
        if device.type == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)
        meta = server.save(ids, table)
        # Others get the blocks at once, as in vLLM.
        for cache in server.paged.caches.values():
            cache.zero_()
        server.worker.saver.flush()
        if device.type == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)
        result = server.load(LoadOrder("hit", (meta.id,), (other,), 0, len(ids) - 1))
        if result.problem or not torch.equal(server.state(other, len(ids) - 1), before):
            raise Wrong(f"round {seed}: {result.problem or 'other state came back'}")
        server.release(table, other)
    server.close()
    return f"{ROUNDS} prompts came back bit for bit"


def worker_blend(device: torch.device) -> str:
    """A blend of vLLM's worker side against the CPU's, with its check of the model."""
    states: list[torch.Tensor] = []
    rows: list[int] = []
    fallbacks: list[str] = []
    for each in (torch.device("cpu"), device):
        server, metas, target = started(vllm_names.engine_config(), 2, 640, 3, None, each)
        order, table, stop = blend_order(server, metas, target)
        result = server.load(order)
        if result.problem:
            raise Wrong(f"on {each.type}: {result.problem}")
        states.append(server.state(table, stop).float())
        rows.append(result.computed)
        fallbacks += server.fallbacks
        server.close()
    near = (states[1] - states[0]).abs() <= 0.08 * states[0].abs().max()
    if float(near.float().mean()) < 0.99:
        raise Wrong(f"{100 - 100 * float(near.float().mean()):.1f}% of the numbers differ")
    kernel = f"without the kernel: {fallbacks[0]}" if fallbacks else "by the kernel"
    kernel = kernel if device.type == "cuda" else "by operations of torch"
    return f"{rows[1]} rows of {stop} recomputed ({rows[0]} on the CPU), {kernel}"


def transformers_hits(device: torch.device) -> str:
    """Exact hits of a transformers model against full computation."""
    text_tokenizer, equal = tokenizer(), 0
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        model = random_llama(SMALL, device, dtype)
        alone = type(model).generate
        options = {"max_new_tokens": 16, "do_sample": False}
        records: list[dejakv.Record] = []
        config = SemanticCacheConfig(reuse="exact", costs=(1.0, 0.0, 0.0, 0.0))
        with dejakv.attach(model, text_tokenizer, config, on_record=records.append) as cache:
            for seed in range(PROMPTS):
                inputs = text_tokenizer(words(300, seed), return_tensors="pt").to(device)
                full = alone(model, **inputs, **options)
                model.generate(**inputs, **options)
                cache.store.flush()
                answer = model.generate(**inputs, **options)
                if not records[-1].reused_tokens:
                    raise Wrong(f"{dtype}: nothing was reused: {records[-1].reason}")
                if dtype == torch.float32 and not torch.equal(full, answer):
                    raise Wrong(f"{dtype}: another answer than full computation's")
                equal += int(torch.equal(full, answer))
    return (
        f"{equal} of {PROMPTS * len(dtypes)} answers equal (all in fp32; bf16 may round otherwise)"
    )


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "fused copy": fused_copies,
    "late saves and exact hits, worker side": saves_and_hits,
    "blend, worker side": worker_blend,
    "exact hits, transformers": transformers_hits,
}

"""What reading K and V out of pages takes, as views and element by element.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m research.vllm.pages [--repeats 9] [--json FILE]

A donor's pages are bytes in the order of the attention kernels. That order is a view in vLLM's
kernels for CPUs and in FlashAttention's, and is read by strides. Other orders are read by an index
for each element, which is how all were read before. Both read the same pages, in turns, on one
thread. Their results are compared bit for bit. Random state: its values do not change the time.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dejakv.engines.vllm.pages import PagedKV
from research.machine import measured, spread

SHAPES = {"smollm2-135m": (30, 3, 64, 32), "llama-3.1-8b": (32, 8, 128, 16)}
"""Layers, KV heads, head size and tokens of a block."""
TOKENS = 1024


class _Kernel:
    """Writes K and V to a cache in the order of a backend's kernels."""

    def __init__(self, order: torch.Tensor) -> None:
        self.order = order

    def do_kv_cache_update(self, _: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        tokens = cache.shape[2]
        flat = cache.view(len(cache), -1)
        for block in (slots // tokens).unique():
            rows = slots // tokens == block
            places = self.order[:, :, slots[rows] % tokens].transpose(1, 2)
            flat[block, places[0]], flat[block, places[1]] = keys[rows], values[rows]


def cpu_order(heads: int, tokens: int, width: int) -> torch.Tensor:
    """Return the places in a block of vLLM's kernels for CPUs, K by number and V by token."""
    block = torch.arange(2 * heads * tokens * width).view(heads, 2, tokens * width)
    return torch.stack(
        [block[:, 0].view(heads, width, tokens).mT, block[:, 1].view(heads, tokens, width)]
    )


def gpu_order(heads: int, tokens: int, width: int) -> torch.Tensor:
    """Return the places in a block of FlashAttention's, K and V of a token side by side."""
    block = torch.arange(2 * heads * tokens * width).view(heads, tokens, 2, width)
    return block.permute(2, 0, 1, 3)


def by_element(pages: torch.Tensor, paged: PagedKV, order: torch.Tensor) -> torch.Tensor:
    """Read K and V by an index for each element, `[2, layers, kv_heads, tokens, head_dim]`."""
    blocks, layers = len(pages), len(paged.caches)
    flat = pages.view(paged.dtype).view(blocks * layers, -1)
    state = torch.empty(paged.shape(TOKENS), dtype=paged.dtype)
    for into, places in zip(state, order, strict=True):
        part = flat.index_select(1, places.flatten()).view(blocks, layers, *places.shape)
        into.unflatten(2, (blocks, -1)).copy_(part.movedim(0, 2))
    return state


def timed(read: Callable[[], torch.Tensor]) -> float:
    start = time.process_time()
    read()
    return (time.process_time() - start) * 1000


def measure(shape: str, dtype: torch.dtype, order_of: Any, repeats: int) -> dict[str, Any]:
    """Measure one shape: milliseconds of processor time of each way, in turns."""
    layers, heads, width, tokens = SHAPES[shape]
    order = order_of(heads, tokens, width)
    names = {f"layer.{number}": SimpleNamespace(impl=_Kernel(order)) for number in range(layers)}
    caches = {name: torch.zeros(4, heads, tokens, 2 * width, dtype=dtype) for name in names}
    paged = PagedKV(names, caches, tokens, 4, dtype, entries=True)
    numbers = torch.randint(0, 120, paged.pages_shape(TOKENS), dtype=torch.uint8)

    ways = {
        "copy": lambda: numbers.clone(),
        "by_element": lambda: by_element(numbers, paged, order),
        "views": lambda: paged.entries(numbers, TOKENS),
    }
    assert torch.equal(ways["views"]().view(torch.uint8), ways["by_element"]().view(torch.uint8))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, read in ways.items():
            times[name].append(timed(read))
    spreads = {name: spread(each) for name, each in times.items()}
    ratio = spreads["by_element"]["p50"] / spreads["views"]["p50"]
    return {
        "shape": shape, "dtype": str(dtype).removeprefix("torch."), "order": order_of.__name__,
        "tokens": TOKENS, "megabytes": numbers.nbytes / 1e6,
        "milliseconds": spreads, "ratio": ratio,
    }  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for order_of in (cpu_order, gpu_order):
                row = measure(shape, dtype, order_of, options.repeats)
                rows.append(row)
                medians = ", ".join(
                    f"{name} {each['p50']:.1f} ms ({each['p10']:.1f} to {each['p90']:.1f})"
                    for name, each in row["milliseconds"].items()
                )
                what = f"{shape}, {row['dtype']}, {row['order']}, {row['megabytes']:.0f} MB"
                print(
                    f"{what}: {medians}; views are {row['ratio']:.1f} times as fast",
                    flush=True,
                )
    if options.json is not None:
        options.json.write_text(
            json.dumps({**measured("research.vllm.pages"), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()

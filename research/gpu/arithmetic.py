"""What vLLM's worker side would take on a GPU, by arithmetic from counts.

No GPU is used: launches and host waits are those that the tests on a pretended GPU allow
(`tests/gpu`), bytes follow from the model's shape, and all else is an assumption that is printed.
A full prefill is taken by its FLOPs.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dejakv.engines.vllm.blend.rows import MERGED_GAP
from dejakv.engines.vllm.device import COPY_THREADS, STAGE_BYTES, UPLOAD_BYTES

COUNTS: dict[str, dict[str, tuple[int, int]]] = {
    "save": {"launches": (1, 8), "loop_waits": (0, 0), "thread_waits": (0, 2)},
    "hit": {"launches": (1, 16), "loop_waits": (0, 0), "thread_waits": (0, 0)},
    "draft": {"launches": (0, 16), "loop_waits": (0, 0), "thread_waits": (0, 12)},
    "take": {"launches": (0, 0), "loop_waits": (0, 0), "thread_waits": (0, 0)},
    "check": {"launches": (12, 70), "loop_waits": (0, 3), "thread_waits": (0, 0)},
    "begin": {"launches": (3, 8), "loop_waits": (0, 1), "thread_waits": (0, 0)},
    "advance": {"launches": (1, 0), "loop_waits": (0, 0), "thread_waits": (0, 0)},
}
"""Launches beside the model's own, host waits of the engine loop and of threads, for each step.

Each is (for each layer, beside the layers), at most. `tests/gpu` holds them.
"""


@dataclass(frozen=True)
class Shape:
    """Shape of a model.

    Attributes
    ----------
    parameters : float
        Parameters that a token passes, without embeddings.
    ranks : int
        Ranks of tensor parallelism.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    ranks: int = 1


SHAPES = {
    "llama-3.1-8b": Shape(32, 32, 8, 128, 6.98e9),
    "qwen2.5-7b": Shape(28, 28, 4, 128, 6.53e9),
    "llama-3.1-70b": Shape(80, 64, 8, 128, 68.5e9, ranks=4),
}


@dataclass(frozen=True)
class Gpu:
    """What is assumed of a GPU: bf16 operations a second, and bytes a second of its memories."""

    flops: float
    memory: float
    cache: float
    pinned: float


GPUS = {
    "h100": Gpu(flops=989e12, memory=3.35e12, cache=5.5e12, pinned=50e9),
    "a100": Gpu(flops=312e12, memory=2.0e12, cache=4.0e12, pinned=24e9),
}


@dataclass(frozen=True)
class Assumptions:
    """What is assumed beside the GPU and the counts.

    Attributes
    ----------
    utilization : float
        Share of the GPU's operations that large products reach.
    launch, wait : float
        Seconds of the host for a launch, and for a wait beside the work that is waited for.
    pageable : float
        Bytes a second that each thread copies from memory that is not pinned into pinned memory.
    share : float
        Share of the tokens that a blend recomputes.
    rows_a_run : float
        Recomputed rows that lie side by side. Runs are scattered by chance.
    tile : int
        Rows that an attention kernel computes for each run, however short.
    model_launches : int
        Launches a layer of the model's own forward, which is not compiled for rows.
    offsets : float
        Seconds of the host for each prompt token, to solve for the weights of offsets.
    """

    utilization: float = 0.5
    launch: float = 6e-6
    wait: float = 20e-6
    pageable: float = 10e9
    share: float = 0.19
    rows_a_run: float = 2.6
    tile: int = 128
    model_launches: int = 42
    offsets: float = 1.3e-6


def estimate(
    shape: Shape, gpu: Gpu, tokens: int, assumed: Assumptions | None = None
) -> dict[str, float]:
    """Return milliseconds of each step for one prompt, and ratios to its full prefill."""
    by = assumed or Assumptions()
    speed, layers = gpu.flops * by.utilization * shape.ranks, shape.layers
    state = 2 * layers * shape.kv_heads * shape.head_dim * 2 * tokens / shape.ranks
    weights = 2 * shape.parameters / shape.ranks / gpu.memory
    rows = round(tokens * by.share)
    runs = rows / by.rows_a_run
    # Runs begin by chance, so that gaps of each length come with this probability.
    begins = runs / (tokens - rows)
    gaps = [begins * (1 - begins) ** length for length in range(MERGED_GAP)]
    sequences = runs * (1 - sum(gaps))
    filled = runs * sum(length * share for length, share in enumerate(gaps, 1))

    def attention(queries: float, keys: float) -> float:
        return 4 * layers * shape.heads * shape.head_dim * queries * keys / speed

    def launches(step: str, pieces: int = 1) -> float:
        a_layer, beside = COUNTS[step]["launches"]
        waits = COUNTS[step]["loop_waits"][1]
        return (a_layer * layers * pieces + beside) * by.launch + waits * by.wait

    full = 2 * shape.parameters * tokens / speed + attention(tokens, tokens / 2)
    rows_product = 2 * shape.parameters * (rows + filled) / speed
    # Each sequence reads its whole past, and takes a tile of the kernel.
    rows_attention = max(
        sequences * state / 2 / gpu.cache,
        attention(sequences * by.tile * shape.kv_heads / shape.heads, tokens / 2),
    )
    forward = by.model_launches * layers * by.launch
    # Threads fill a batch of pinned memory while the one before it goes up.
    batch = min(UPLOAD_BYTES, state)
    pinning, going_up = by.pageable * COPY_THREADS, gpu.pinned
    upload = state / min(pinning, going_up) + batch / max(pinning, going_up)
    steps = {
        "draft": upload + COUNTS["draft"]["launches"][1] * by.launch,
        "begin": max(launches("begin") + forward, weights),
        "offsets": by.offsets * tokens,
        "advance": max(launches("advance") + forward, rows_product + rows_attention),
        "last tokens": weights,
    }
    blend = sum(steps.values())
    hit_loop = launches("hit", math.ceil(state / STAGE_BYTES))
    milliseconds = {
        "full prefill": full,
        **{f"blend, {name}": seconds for name, seconds in steps.items()},
        "blend": blend,
        "exact hit, read into pinned memory by threads": state / pinning,
        "exact hit, engine loop": hit_loop,
        "exact hit, copy beside it": state / gpu.pinned + 2 * state / gpu.memory,
        "save, engine loop": launches("save", math.ceil(2 * state / STAGE_BYTES)),
        "save, copy beside it": state / gpu.pinned + 2 * state / gpu.memory,
    }
    return {
        **{name: seconds * 1000 for name, seconds in milliseconds.items()},
        "blend of full prefill": blend / full,
        "bound of a blend by its rows' products": 2 * shape.parameters * rows / speed / full,
    }


def run(model: str, tokens: int, gpu_name: str, json_file: Path | None) -> None:
    """Print milliseconds for one model of `SHAPES`, or `all`, and write them to a file."""
    names = list(SHAPES) if model == "all" else [model]
    gpu = GPUS[gpu_name]
    result: dict[str, Any] = {
        "what": "arithmetic from counts of a pretended GPU: nothing here was measured on a GPU",
        "gpu": {"name": gpu_name, **asdict(gpu)},
        "assumptions": asdict(Assumptions()),
        "tokens": tokens,
        "counts": COUNTS,
        "models": {name: estimate(SHAPES[name], gpu, tokens) for name in names},
    }
    if json_file:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    print(f"{result['what']}.\n{tokens} tokens on one {gpu_name} a rank; assumed:")
    for name, value in (asdict(gpu) | asdict(Assumptions())).items():
        print(f"  {name} {value:g}")
    for name, figures in result["models"].items():
        ranks = SHAPES[name].ranks
        print(f"\n{name}{f', {ranks} ranks' if ranks > 1 else ''}")
        for figure, value in figures.items():
            unit = "" if " of " in figure else " ms"
            print(f"  {figure:48} {value:9.2f}{unit}")

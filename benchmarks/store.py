"""What a store costs: loading and saving a 10 MB chunk, beside copying the same bytes and beside `torch.load`.

    python benchmarks/store.py [--megabytes 10] [--repeats 101] [--output store.json]

All ways take turns in one run, so that a busy machine slows all of them; medians are printed with their 10th and 90th
percentile. The page cache is warm. `memcpy` copies the bytes into memory that is already there. Loads verify the checksum
every time; `DiskStore.get` is the whole path a request takes: catalog, file, map, verification.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.checksum import checksum
from dejakv.store.directory import Directory
from dejakv.store.disk import DiskStore
from dejakv.store.files import read_chunk
from dejakv.store.memory import MemoryStore
from dejakv.store.tiered import TieredStore

GOAL = 2.0


def machine() -> dict[str, object]:
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def measure(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each way, which take turns; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, call in ways.items():
            elapsed = timed(call)
            if turn:
                times[name].append(elapsed)
    quantiles = {"median_ms": 50, "p10_ms": 10, "p90_ms": 90}
    return {
        name: {key: float(np.percentile(taken, q)) for key, q in quantiles.items()} for name, taken in times.items()
    }


def chunk_of(megabytes: float) -> Chunk:
    """The KV of a prompt of a model with 16 layers, 4 KV heads and head_dim 64, of about this size in bf16."""
    tokens = max(1, round(megabytes * 2**20 / (2 * 16 * 4 * 64 * 2)))
    shape = (2, 16, 4, tokens, 64)
    data = np.random.default_rng(0).integers(0, 2**16, shape, dtype=np.uint16)
    meta = ChunkMeta("a" * 40, "default", "epoch", tuple(range(tokens)), "prompt", "chunk")
    return Chunk(meta, Tensor(data, "BF16"))


def saves(chunk: Chunk, store: DiskStore, folder: Path) -> dict[str, Callable[[], object]]:
    tensor = torch.from_numpy(chunk.tensor.data).view(torch.bfloat16)

    def torch_save() -> None:
        with (folder / "saved.pt").open("wb") as file:
            torch.save(tensor, file)
            file.flush()
            os.fsync(file.fileno())

    return {"DiskStore.put (fsync)": lambda: store.put(chunk), "torch.save (fsync)": torch_save}


def loads(chunk: Chunk, store: DiskStore, folder: Path) -> dict[str, Callable[[], object]]:
    source, target = chunk.tensor.data, np.empty_like(chunk.tensor.data)
    path = folder / "loaded.pt"
    torch.save(torch.from_numpy(source).view(torch.bfloat16), path)
    chunks = Directory.open(store.folder / "chunks")
    (file,) = chunks.path.glob("*/*.safetensors")
    name, size = str(file.relative_to(chunks.path)), file.stat().st_size
    octets = source.reshape(-1).view(np.uint8)
    tiered = TieredStore(MemoryStore(), store)
    tiered.get(chunk.meta.id)

    def load_and_copy() -> None:
        found = store.get(chunk.meta.id)
        assert found is not None
        np.copyto(target, found.tensor.data)

    return {
        "memcpy": lambda: np.copyto(target, source),
        "DiskStore.get (verified)": lambda: store.get(chunk.meta.id),
        "DiskStore.get + copy out": load_and_copy,
        "TieredStore.get (in memory)": lambda: tiered.get(chunk.meta.id),
        "file mapped, not verified": lambda: read_chunk(chunks, name, size),
        "checksum alone, in memory": lambda: checksum(source),
        "zlib.crc32, in memory": lambda: zlib.crc32(octets),
        "blake2b, in memory": lambda: hashlib.blake2b(octets).digest(),
        "torch.load (weights_only)": lambda: torch.load(path, weights_only=True),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--dir", type=Path, default=None, help="where to put the files (default: a temporary folder)")
    parser.add_argument("--output", type=Path, default=None, help="write the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chunk = chunk_of(options.megabytes)
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load {about['load_average']:.1f}, Python {about['python']}")
    print(
        f"one chunk of {chunk.tensor.nbytes / 2**20:.1f} MiB {chunk.tensor.dtype} {list(chunk.tensor.shape)}, {options.repeats} turns"
    )
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        store = DiskStore(Path(folder) / "store")
        saved = measure(saves(chunk, store, Path(folder)), max(5, options.repeats // 5))
        loaded = measure(loads(chunk, store, Path(folder)), options.repeats)
        store.close()
    base = loaded["memcpy"]["median_ms"]
    for name, row in {**loaded, **saved}.items():
        row["over_memcpy"] = row["median_ms"] / base
        print(
            f"{name:30s} {row['median_ms']:9.3f} ms  ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})  {row['over_memcpy']:7.2f} x memcpy"
        )
    ratio = loaded["DiskStore.get (verified)"]["over_memcpy"]
    print(f"goal: a load within {GOAL:g} x memcpy: {ratio:.2f}, {'met' if ratio <= GOAL else 'missed'}")
    if options.output:
        results = {
            "machine": about,
            "bytes": chunk.tensor.nbytes,
            "repeats": options.repeats,
            "load": loaded,
            "save": saved,
        }
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

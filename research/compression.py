"""What smaller state costs: exact compression of real KV, and donors of a blend in 8 bits.

    python -m research.compression [--quick] --output FILE.json

Exact: zstd over the state of segments of 256 tokens as they are stored, the bytes of each element apart (planes) or as they are; ratio, and
MB/s each way on one core, of the raw bytes. A link of B bytes a second gains where B is below `gains_below_mbit`: there the bytes spared
take longer than packing (once) and unpacking. Blends: every donor's K and V rounded to 8 bits with a scale for each head and channel
(`int8`), or a scale for each head (`fp8`, e4m3); KL along full computation's answer beside that of exact donors, on the cases of `research.frontier`.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from dejakv.store.base import Tensor
from research.command import run

Bytes = NDArray[np.uint8]
TOKENS = 256
LINKS = {"1 Gbit/s": 125.0, "10 Gbit/s": 1250.0}
"""MB/s."""
KINDS = ("edit", "reorder", "apart")


def states(dtype: str, segments: int) -> list[Bytes]:
    """The bytes of so many segments of prompts of `rag`, computed by SmolLM2 in this dtype."""
    import torch

    from dejakv.engines.transformers import TransformersEngine
    from dejakv.engines.transformers.kv import captured, plain_cache
    from research.workloads.streams import chosen_of, stream_of

    engine = TransformersEngine.from_pretrained("smollm2-135m", dtype=dtype, device="cpu")
    chosen, prompter, _ = chosen_of(stream_of("rag", "transformers", segments))
    made: list[Bytes] = []
    for sample in chosen:
        ids = engine.prepare(prompter.request(sample)).token_ids[: 2 * TOKENS]
        cache = plain_cache()
        with torch.inference_mode():
            engine.model(input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        state = captured(cache, len(ids))
        assert state is not None
        made.append(np.ascontiguousarray(state.rows(TOKENS, 2 * TOKENS).data).reshape(-1).view(np.uint8))
    return made


def packings(level: int, width: int) -> dict[str, tuple[Callable[[Bytes], Any], Callable[[Any], Bytes]]]:
    """Ways to pack the bytes of elements of `width` bytes, and to unpack them."""
    import zstandard

    to, back = zstandard.ZstdCompressor(level), zstandard.ZstdDecompressor()

    def planes(data: Bytes) -> list[bytes]:
        return [to.compress(np.ascontiguousarray(data[place::width])) for place in range(width)]

    def whole(packed: Sequence[bytes]) -> Bytes:
        first = np.frombuffer(back.decompress(packed[0]), np.uint8)
        made = np.empty((first.size, width), np.uint8)
        made[:, 0] = first
        for place in range(1, width):
            made[:, place] = np.frombuffer(back.decompress(packed[place]), np.uint8)
        return made.reshape(-1)

    def last(data: Bytes) -> list[bytes]:
        """The plane with sign and exponent alone: the others are nearly random."""
        view = data.reshape(-1, width)
        return [
            np.ascontiguousarray(view[:, : width - 1]).tobytes(),
            to.compress(np.ascontiguousarray(view[:, width - 1])),
        ]

    def joined(packed: Sequence[bytes]) -> Bytes:
        top = np.frombuffer(back.decompress(packed[1]), np.uint8)
        made = np.empty((top.size, width), np.uint8)
        made[:, width - 1] = top
        made[:, : width - 1] = np.frombuffer(packed[0], np.uint8).reshape(-1, width - 1)
        return made.reshape(-1)

    return {
        "as it is": (lambda data: [to.compress(data)], lambda packed: np.frombuffer(back.decompress(packed[0]), np.uint8)),
        "planes": (planes, whole),
        "top plane": (last, joined),
    }  # fmt: skip


def exact(segments: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for dtype, width in (("fp32", 4), ("bf16", 2)):
        held = states(dtype, segments)
        for level in (1, 3):
            for name, (pack, unpack) in packings(level, width).items():
                sizes, there, back_again = 0, list[float](), list[float]()
                for data in held:
                    began = time.perf_counter()
                    packed = pack(data)
                    middle = time.perf_counter()
                    same = unpack(packed)
                    ended = time.perf_counter()
                    assert np.array_equal(same, data)
                    sizes += sum(map(len, packed))
                    there.append(data.size / 1e6 / (middle - began))
                    back_again.append(data.size / 1e6 / (ended - middle))
                rows.append(_row(dtype, level, name, sum(data.size for data in held) / sizes, there, back_again))
    return rows


def _row(dtype: str, level: int, name: str, ratio: float, there: list[float], back: list[float]) -> dict[str, Any]:
    pack, unpack = statistics.median(there), statistics.median(back)
    spared = 1 - 1 / ratio
    return {
        "dtype": dtype, "level": level, "way": name, "ratio": ratio, "pack_mb_s": pack, "unpack_mb_s": unpack,
        # of a load: seconds a MB that a link spares, less those that unpacking takes
        "load_gains_ms_a_10mb": {link: 1e4 * (spared / rate - 1 / unpack) for link, rate in LINKS.items()},
        "gains_below_mbit": {"load": 8 * spared * unpack, "store": 8 * spared * pack},
    }  # fmt: skip


def rounded(state: Tensor, way: str) -> tuple[Tensor, int]:
    """A donor's state through 8 bits, and the bytes that it takes so."""
    import torch

    values = torch.from_numpy(np.array(state.data, dtype=np.float32))  # [2, layers, kv_heads, rows, head_dim]
    most = values.abs().amax(3 if way == "int8" else (3, 4), keepdim=True).clamp_min(1e-12)
    if way == "int8":
        made = (values / most * 127).round().clamp(-127, 127) * (most / 127)
    else:
        made = (values / most * 448).to(torch.float8_e4m3fn).float() * (most / 448)
    return replace(state, data=made.numpy()), values.numel() + 2 * most.numel()


def blends(samples: int) -> dict[str, Any]:
    """KL and likeliest tokens of the default blend, from exact donors and from those in 8 bits."""
    from dejakv.engines.transformers import TransformersEngine
    from dejakv.trust.differs import divergence
    from research.frontier.bench import Bench, captured_state, greedy, scored
    from research.frontier.cases import TextCases
    from research.frontier.cells import CELLS

    engine = TransformersEngine.from_pretrained("smollm2-135m", dtype="fp32", device="cpu")
    cases = TextCases(3)
    bench, (default,) = Bench(engine, cases.steps), [cell for cell in CELLS if cell.name == "default"]
    made: dict[str, Any] = {}
    for kind in KINDS:
        kl: dict[str, list[float]] = {}
        top: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        for number in range(samples):
            case = cases.make(kind, number, bench.encode, 0)
            donors = [captured_state(engine, ids)[1] for ids in case.donors]
            full = captured_state(engine, case.target)[0]
            tokens = greedy(full, cases.steps)
            wanted = scored(full, tokens)
            ways = {"exact": (donors, sum(one.nbytes for one in donors))}
            for way in ("int8", "fp8"):
                pairs = [rounded(one, way) for one in donors]
                ways[way] = [one for one, _ in pairs], sum(size for _, size in pairs)
            for way, (given, size) in ways.items():
                got = scored(bench.blend(case, given, default)[0], tokens)
                kl.setdefault(way, []).append(float(divergence(wanted, got).mean()))
                top.setdefault(way, []).append(float((wanted.argmax(-1) == got.argmax(-1)).mean()))
                sizes[way] = sizes.get(way, 0) + size
        made[kind] = {
            way: {
                "n": samples, "kl": statistics.fmean(kl[way]), "top1": statistics.fmean(top[way]),
                "bytes_by_fp32": sizes[way] / sizes["exact"],
                "kl_more": interval([one - other for one, other in zip(kl[way], kl["exact"], strict=True)]),
            }
            for way in kl
        }  # fmt: skip
    return made


def interval(values: Sequence[float]) -> list[float]:
    """Mean, and 95% by bootstrap."""
    held = np.asarray(values)
    means = held[np.random.default_rng(0).integers(0, len(held), (10_000, len(held)))].mean(1)
    return [float(held.mean()), *np.percentile(means, [2.5, 97.5]).tolist()]


def compression(
    output: Annotated[Path, typer.Option(help="JSON file.")],
    quick: Annotated[bool, typer.Option("--quick", help="2 segments and 2 cases of each kind.")] = False,
) -> None:
    """Measure exact compression of stored state, and blends from donors in 8 bits."""
    import torch

    from research.machine import measured

    torch.set_num_threads(1)
    found = {
        **measured("research.compression"),
        "exact": exact(2 if quick else 12),
        "blends": blends(2 if quick else 20),
    }
    output.write_text(json.dumps(found, indent=1) + "\n")
    for row in found["exact"]:
        typer.echo(
            f"{row['dtype']} zstd-{row['level']} {row['way']:10} {row['ratio']:.3f}, MB/s {row['pack_mb_s']:.0f} and {row['unpack_mb_s']:.0f}, a load of 10 MB "
            + ", ".join(f"{gain:+.1f} ms at {link}" for link, gain in row["load_gains_ms_a_10mb"].items())
        )
    for kind, ways in found["blends"].items():
        for way, row in ways.items():
            typer.echo(
                f"{kind:8} {way:6} KL {row['kl']:.4f}, top-1 {row['top1']:.3f}, bytes {row['bytes_by_fp32']:.3f}"
            )


if __name__ == "__main__":
    run(compression)

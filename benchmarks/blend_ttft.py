"""Time to first token of blending against full prefill, on random weights of a real model's shape.

    python benchmarks/blend_ttft.py --shape qwen2.5-0.5b --tokens 512 1024 2048 --output docs/results/blend_ttft.json

The donor is the prompt with a share of its sentences replaced, so the map has work to do. Blending's time includes looking
the donor up (pooled embedding against 1,000 others), the token map, rearranging and moving the state, and the partial prefill.
The FLOP limit is the floating-point operations of full prefill over those of the rows that were computed.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dejakv.engines.transformers.blend import plan_cache
from dejakv.engines.transformers.blend_check import seams_of
from dejakv.engines.transformers.kv import captured, plain_cache
from dejakv.index.base import normalized
from dejakv.reuse.blend import BlendConfig, find
from dejakv.reuse.schedule import Schedule, with_mean
from dejakv.reuse.selector import Selector
from dejakv.reuse.token_map import Donors

SHAPES = {
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151_936),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 128_256),
    "mistral-7b": ("mistral", 4096, 14336, 32, 32, 8, 32_768),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128_256),
    "tiny": ("llama", 64, 128, 4, 4, 2, 1000),
}
"""Family, hidden size, MLP size, layers, heads, key heads, vocabulary."""
END = 13
SENTENCE = 20
METHODS = (
    # name, selector, complete layers, mean share (None: by need alone)
    ("last token only", "similarity", 0, 0.0),
    ("15%, from the map, no complete layer", "similarity", 0, 0.15),
    ("15%, V compared, one complete layer", "value", 1, 0.15),
    ("33%, V compared, one complete layer, falling", "value", 1, 0.33),
    ("by need", "similarity", 0, None),
    ("everything, through the plan", "similarity", 0, 1.0),
)


def make(shape: str, device: str, dtype: torch.dtype):
    family, hidden, mlp, layers, heads, key_heads, vocabulary = SHAPES[shape]
    config = CONFIG_MAPPING[family](
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, max_position_embeddings=1 << 16, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def prompts(tokens: int, vocabulary: int, changed: float) -> tuple[np.ndarray, np.ndarray]:
    """Donor and target: sentences of Zipf-distributed words, a share of the target's sentences new."""
    rng = np.random.default_rng(7)
    donor = 20 + (rng.zipf(1.3, tokens) % (vocabulary - 20))
    donor[SENTENCE - 1 :: SENTENCE] = END
    target = donor.copy()
    starts = np.arange(SENTENCE, tokens - SENTENCE, SENTENCE)
    for start in rng.choice(starts, round(changed * len(starts)), replace=False):
        target[start : start + SENTENCE - 1] = 20 + (rng.zipf(1.3, SENTENCE - 1) % (vocabulary - 20))
    return donor, target


def flops(shape: str, tokens: int, rows: list[int]) -> float:
    """Multiply-adds of the rows computed: projections and MLP by rows, attention by rows times keys (halved: causal)."""
    _, hidden, mlp, _, heads, key_heads, _ = SHAPES[shape]
    head = hidden // heads
    linear = hidden * head * (2 * heads + 2 * key_heads) + 3 * hidden * mlp
    return float(sum(count * (linear + 2 * heads * head * tokens / 2) for count in rows))


@torch.inference_mode()
def full_prefill(model, ids: torch.Tensor):
    cache = plain_cache()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CLOCK_NAMES = {
    "wall": "median of wall-clock time",
    "cpu": "least processor time of the one thread (the machine was shared)",
}
_clock = ["wall"]


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return CLOCKS[_clock[0]]()


@torch.inference_mode()
def measure(model, shape: str, tokens: int, repeats: int, device: str, changed: float) -> list[dict]:
    vocabulary = SHAPES[shape][6]
    donor_ids, target_ids = prompts(tokens, vocabulary, changed)
    weight = model.get_input_embeddings().weight
    table = torch.randn(1000, weight.shape[1])
    seams_of(model)
    state = captured(full_prefill(model, torch.tensor(donor_ids[None], device=device)), tokens)
    ids = torch.tensor(target_ids[None], device=device)
    ends = np.array([END], dtype=np.int64)
    donors = Donors.of(donor_ids)

    def embed(wanted):
        return weight[torch.as_tensor(np.asarray(wanted), device=device)].float().cpu().numpy()

    def full() -> tuple[float, dict]:
        begun = clock(device)
        full_prefill(model, ids)
        return clock(device) - begun, {}

    def blend(selector: str, complete: int, mean: float | None, falling: bool) -> tuple[float, dict]:
        layers = len(seams_of(model).layers)
        begun = clock(device)
        pooled = torch.from_numpy(normalized(embed(target_ids).mean(0, keepdims=True)))
        (pooled @ table.T).argmax()
        looked = clock(device)
        share = 0.0 if mean is None else mean
        config = BlendConfig(
            selector=selector, share=min(1.0, share), by_need=mean is None, rule=None if mean is None else "none",
            min_similarity=0.2 if mean is None else 0.0, max_share=1.0, tail=None if mean is None else 1,
        )  # fmt: skip
        found, needed = find(target_ids, donors, embed, config, ends)
        mapped = clock(device)
        name = "exponential" if falling else "constant"
        schedule = with_mean(name, layers, share, complete=complete) if share < 1 else Schedule((1.0,) * layers)
        planned = plan_cache(
            model, target_ids.tolist(), [[(0, state)]], donors, found, needed, schedule, Selector(selector)
        )
        ready = clock(device)
        model(input_ids=ids, past_key_values=planned.cache, use_cache=True, logits_to_keep=1)
        done = clock(device)
        trace = planned.cache.trace
        limit = flops(shape, tokens, [tokens] * layers) / flops(shape, tokens, trace.counts)
        times = {"lookup": looked - begun, "map": mapped - looked, "rearrange": ready - mapped, "prefill": done - ready}
        return done - begun, {
            "share": trace.share,
            "flop_limit": limit,
            **{f"{k}_ms": 1e3 * v for k, v in times.items()},
        }

    rows = []
    runs = {"full prefill": [], **{name: [] for name, *_ in METHODS}}
    details: dict[str, list[dict]] = {name: [] for name in runs}
    full()  # warm up
    blend("value", 1, 0.15, False)
    for _ in range(repeats):  # interleaved, so that a busy machine is equally busy for all
        seconds, _ = full()
        runs["full prefill"].append(seconds)
        for name, selector, complete, mean in METHODS:
            seconds, detail = blend(selector, complete, mean, "falling" in name)
            runs[name].append(seconds)
            details[name].append(detail)
    # On a shared machine other work only adds processor time (cold caches), so the least of the repeats is the truest.
    middle = min if _clock[0] == "cpu" else statistics.median
    base = middle(runs["full prefill"])
    for name, seconds in runs.items():
        took = middle(seconds)
        row = {"tokens": tokens, "method": name, "ttft_ms": round(1e3 * took, 2), "ratio": round(base / took, 3)}
        row["ttft_ms_range"] = [round(1e3 * min(seconds), 2), round(1e3 * max(seconds), 2)]
        if details[name]:
            row |= {key: round(middle(d[key] for d in details[name]), 4) for key in details[name][0]}
            row["of_limit"] = round(row["ratio"] / row["flop_limit"], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def table(report: dict) -> str:
    lines = [
        "# Blend: time to first token against full prefill",
        "",
        f"Random weights of the shape of {report['shape']}, {report['dtype']}, {report['device']}, {report['threads']} thread(s); "
        f"{report['changed']:.0%} of the sentences new; {report['repeats']} repeats, interleaved, {CLOCK_NAMES[report['clock']]}. Lookup among 1,000 prompts, token "
        "map, rearranging and moving the state are in blending's time. Command: "
        f"`python benchmarks/blend_ttft.py {report['command']}`. Machine: {report['machine']}.",
        "",
        "| tokens | method | rows computed | TTFT ms | ratio | FLOP limit | of limit | lookup | map | rearrange |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        if "share" not in row:
            lines.append(f"| {row['tokens']} | {row['method']} | 100% | {row['ttft_ms']} | 1 | 1 | | | | |")
            continue
        lines.append(
            f"| {row['tokens']} | {row['method']} | {row['share']:.1%} | {row['ttft_ms']} | {row['ratio']:.2f} | "
            f"{row['flop_limit']:.2f} | {row['of_limit']:.0%} | {row['lookup_ms']:.2f} | {row['map_ms']:.1f} | {row['rearrange_ms']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), name
        )
    return name


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--changed", type=float, default=0.1, help="share of the target's sentences that are new")
    parser.add_argument("--output", type=Path, help="JSON file; a Markdown table is written beside it")
    parser.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall",
        help="cpu: processor time of the process, for one thread on a machine that others use too",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.clock == "cpu" and (given.threads != 1 or given.device != "cpu"):
        parser.error("--clock cpu measures one thread on the CPU: add --threads 1 --device cpu")
    _clock[0] = given.clock
    torch.set_num_threads(given.threads)
    model = make(given.shape, given.device, {"fp32": torch.float32, "bf16": torch.bfloat16}[given.dtype])
    command = f"--shape {given.shape} --tokens {' '.join(map(str, given.tokens))} --dtype {given.dtype} --repeats {given.repeats} --clock {given.clock}"
    where = machine() if given.device == "cpu" else torch.cuda.get_device_name()
    report = {
        "shape": given.shape, "dtype": given.dtype, "device": given.device, "threads": given.threads, "repeats": given.repeats,
        "changed": given.changed, "clock": given.clock, "command": command, "machine": where, "rows": [],
    }  # fmt: skip
    for tokens in given.tokens:
        report["rows"] += measure(model, given.shape, tokens, given.repeats, given.device, given.changed)
        if given.output:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(report, indent=1) + "\n")
            given.output.with_suffix(".md").write_text(table(report))
    return report


if __name__ == "__main__":
    main()

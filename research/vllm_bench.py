"""What the vLLM benchmarks share: an engine in a process of its own, first-token times, paired runs with an interval.

Each arm of a pair runs in a fresh process (vLLM keeps connectors in globals), the arms take turns, and the interval is that of
the paired differences. Greedy; `--model` names the bundled documents model (fp32) or a real model's shape with random weights
(bf16); everything else as written in the calling script.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dejakv.models import path, resolve
from research.machine import machine as facts

DOCS = "docs-lm"
SMOLLM2 = "smollm2-135m"
SHAPES: dict[str, dict[str, Any]] = {
    # Published configurations. Qwen2.5-0.5B: 494 million parameters, 12 KiB of KV a token in bf16
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    # Mistral-7B-v0.3: 128 KiB of KV a token
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_768,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    # Llama-3.1-8B: 128 KiB of KV a token
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
LARGE = ("mistral-7b", "llama-3.1-8b")
"""Whose weights are drawn as vLLM starts: they would take 15 GB of disk each."""
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
         "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
"""What makes a shape small: the same kind of model, to try a script on."""
NAMES = (DOCS, SMOLLM2, *SHAPES, *(f"{name}-small" for name in LARGE))


def folder_of(name: str) -> Path:
    """The model's folder; one with random weights is made in the system's folder for temporary files, and kept there."""
    docs = path(DOCS)
    if name == DOCS:
        return docs
    if name == SMOLLM2:
        return Path(resolve(name))
    folder = Path(tempfile.gettempdir()) / f"dejakv-benchmark-{name}"
    if not (folder / "config.json").is_file():
        made = folder.with_suffix(".part")
        _make(name, made)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(docs / file, made / file)
        made.rename(folder)
    return folder


def _make(name: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = name.removesuffix("-small")
    values = SHAPES[shape] | (SMALL if name != shape else {})
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    if shape in LARGE:
        with torch.device("meta"):
            config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
        config.dtype = torch.bfloat16
        config.save_pretrained(folder)
        return
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def options_of(name: str) -> dict[str, Any]:
    """How vLLM is to load it."""
    if name in (DOCS, SMOLLM2):
        return {"dtype": "float32"}
    return {"dtype": "bfloat16"} | ({"load_format": "dummy"} if name.removesuffix("-small") in LARGE else {})


MODEL = DOCS
VOCABULARY = range(8, 480)
T95 = (0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)  # fmt: skip


def repeats(small: int, large: int) -> int:
    """How often to repeat: `small` for the bundled model, `large` for one that takes seconds a prompt."""
    return small if MODEL == DOCS else large


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(count)]


def changed(prompt: Sequence[int], share: float, seed: int, start: int | None = None) -> list[int]:
    """The prompt with one run of tokens replaced, as an edit of a document does; somewhere, or from `start` on."""
    rng = random.Random(seed)
    length = max(1, int(share * len(prompt)))
    place = rng.randrange(32, len(prompt) - length - 32) if start is None else start
    return [*prompt[:place], *tokens(length, seed + 1), *prompt[place + length :]]


class Server:
    """An offline vLLM, stepped by hand so that first tokens can be timed."""

    def __init__(self, extra: dict[str, Any] | None, **options: Any) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from dejakv.engines.vllm.bind import EXTENSION
        from dejakv.experiments.vllm_engine import KV_CONNECTOR

        if extra is not None:
            options["kv_transfer_config"] = KVTransferConfig(**KV_CONNECTOR, kv_connector_extra_config=extra)
            options["worker_extension_cls"] = EXTENSION
        defaults = {
            **options_of(MODEL),
            "max_model_len": 2048,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "block_size": 32,
        }
        self.llm = LLM(
            str(folder_of(MODEL)), **{**defaults, "enable_prefix_caching": True, "disable_log_stats": True, **options}
        )
        self._number = 0

    def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, wish: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Answers a batch that arrives at once: seconds to the first token, cached tokens, tokens, what was told."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        extra = {"kv_transfer_params": {"dejakv": wish}} if wish is not None else None
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        began, names = time.perf_counter(), []
        for prompt in prompts:
            self._number += 1
            names.append(str(self._number))
            engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, params)
        found: dict[str, dict[str, Any]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                entry = found.setdefault(output.request_id, {"ttft": time.perf_counter() - began})
                entry["latency"] = time.perf_counter() - began
                entry["cached"] = output.num_cached_tokens or 0
                entry["tokens"] = list(output.outputs[0].token_ids)
                entry["told"] = ((output.kv_transfer_params or {}).get("dejakv")) or {}
        return [found[name] for name in names]

    def stored(self) -> bool:
        """Waits until every save is stored. False without a connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return has_kv_transfer_group() and get_kv_transfer_group().worker_side.saver.flush()

    def settle(self) -> None:
        """Waits until every save is stored and can be found."""
        if self.stored():
            self.run([[9, 9, 9]], max_tokens=2)
            self.run([[9, 9, 8]], max_tokens=2)

    def forget_prefixes(self) -> None:
        self.llm.reset_prefix_cache()


def main(
    about: str, arms: Sequence[str], worker: Callable[[str, int], dict[str, Any]], report: Callable[..., dict[str, Any]]
) -> None:
    """Runs the arms in turns and prints one JSON object. `worker(arm, pair)` runs in a process of its own."""
    parser = arguments(about)
    parser.add_argument("--pairs", type=int, default=4, help="how often each arm runs")
    parser.add_argument("--pair", type=int, default=0, help=argparse.SUPPRESS)
    given = parsed(parser)
    if given.arm:
        print("RESULT " + json.dumps(worker(given.arm, given.pair)))
        return
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for pair in range(given.pairs):
        for turn in range(len(arms)):
            arm = arms[(turn + pair) % len(arms)]
            results[arm].append(_spawn(arm, pair, given))
    publish(given, {"pairs": given.pairs, **report(results)})


def arguments(about: str) -> argparse.ArgumentParser:
    """What every script takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS")
    parser.add_argument("--model", choices=NAMES, default=DOCS, help="its weights are random if it is not bundled")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line; its model is the one that every `Server` of this process runs."""
    global MODEL
    given = parser.parse_args()
    MODEL = given.model
    return given


def publish(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Prints what was found and where, as one JSON object, and writes it if asked to."""
    text = json.dumps({"machine": machine(), "model": MODEL, "threads": given.threads, **found}, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


def command_of(arm: str, given: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Command and environment of an arm's process."""
    command = [sys.executable, "-W", "ignore", *this_module(), "--arm", arm, "--model", given.model]
    return command, {**os.environ, "OMP_NUM_THREADS": str(given.threads), "TORCHDYNAMO_DISABLE": "1"}


def result_in(lines: Iterable[str]) -> Any:
    """What an arm's process prints behind `RESULT`; None if it never does."""
    return next((json.loads(line[7:]) for line in lines if line.startswith("RESULT ")), None)


def _spawn(arm: str, pair: int, given: argparse.Namespace) -> dict[str, Any]:
    command, environment = command_of(arm, given)
    done = subprocess.run([*command, "--pair", str(pair)], env=environment, capture_output=True, text=True)
    found = result_in(done.stdout.splitlines())
    if found is not None:
        return found
    raise SystemExit(f"the arm {arm} did not finish:\n{done.stderr[-3000:]}")


def paired(differences: Sequence[float]) -> dict[str, float]:
    """Mean and 95% interval (Student's t) of paired differences."""
    mean = statistics.fmean(differences)
    count = len(differences)
    if count < 2:
        return {"mean": mean, "low": math.nan, "high": math.nan}
    half = T95[min(count - 1, len(T95) - 1)] * statistics.stdev(differences) / math.sqrt(count)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds, of seconds."""
    ordered = sorted(values)
    return {
        "p50_ms": 1e3 * statistics.median(ordered),
        "p95_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
    }


def this_module() -> list[str]:
    """Python's arguments that run the module of this process's command line again."""
    return ["-m", f"research.{Path(sys.argv[0]).stem}"]


def machine() -> str:
    """The processor, how many cores, and how busy they are."""
    found = facts()
    return f"{found['cpu']}, {found['cores']} cores, load {found['load_average']:.1f}"

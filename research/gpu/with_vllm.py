# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""DejaKV's connector in a vLLM of this device: checks around a small model, or figures of a shape.

    python -m research.gpu.with_vllm checks|figures --output FILE [--tiny] [--seconds N]

`research.gpu` runs it, each part in a process of its own, since vLLM gives a GPU's memory back when
its process ends. The file has one JSON object a line: `["check", name, what was seen]`,
`["row", row]` or `["left out", why]`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from dejakv.engines.vllm.bind import EXTENSION
from research.gpu.models import (
    LENGTHS,
    SHAPE_8B,
    SMALL,
    TINY_LENGTHS,
    WORDS,
    lengths_in_time,
    random_llama,
    tokenizer,
    words,
)

Note = Callable[..., None]
REPEATS, PASSAGES = 3, 5
LOADED, ANSWER = 16, 8
"""Prompts that are asked at once, and tokens of an answer."""
BLOCKS_8B = 24 << 30
"""Memory of the device for weights of the whole 8B shape and prompts of 32,000 tokens."""
STORE_BYTES = 48 << 30


class WrongAnswerError(Exception):
    """A check failed."""


class Engine:
    """A vLLM with the connector in this process, whose steps are timed."""

    def __init__(self, folder: Path, extra: dict[str, Any], **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="DejaKVConnector",
            kv_connector_module_path="dejakv.engines.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "modes": ["off", "exact", "blend"],
                "blend_max_share": 1.0,
                "lookup_timeout_s": 30,
                "load_timeout_s": 60,
                **extra,
            },
        )
        self.llm = LLM(
            str(folder),
            kv_transfer_config=transfer,
            worker_extension_cls=EXTENSION,
            enforce_eager=True,
            enable_prefix_caching=True,
            **options,
        )
        self.tokenizer = self.llm.get_tokenizer()
        self.longest_step = 0.0
        step = self.llm.llm_engine.step

        def timed_step() -> Any:
            start = time.perf_counter()
            try:
                return step()
            finally:
                self.longest_step = max(self.longest_step, time.perf_counter() - start)

        self.llm.llm_engine.step = timed_step

    @property
    def worker_side(self) -> Any:
        """Worker side of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    def ask(self, prompts: Sequence[str], mode: str, tokens: int = ANSWER) -> list[Any]:
        """Answer prompts at once, greedily; each answer has what the connector tells of it."""
        from vllm import SamplingParams

        # What is not to be reused is not stored either.
        wish = {"mode": mode, **({"no_store": True} if mode == "off" else {})}
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"dejakv": wish}},
        )
        ids = [{"prompt_token_ids": self.tokenizer(prompt)["input_ids"]} for prompt in prompts]
        return self.llm.generate(ids, sampling, use_tqdm=False)

    def settle(self) -> None:
        """Wait until all that was saved is stored, and empty vLLM's own prefix cache."""
        core = self.llm.llm_engine.engine_core.engine_core
        until = time.monotonic() + 120
        while time.monotonic() < until:
            self.worker_side.saver.flush(60)
            if not core.scheduler.connector.scheduler_side.saves.pending:
                break
            # A step carries the confirmation.
            self.ask(["w1 w2 w3"], "off", 1)
        if not self.llm.reset_prefix_cache():
            raise WrongAnswerError("vLLM's blocks are still in use")


def reuse_of(answer: Any) -> dict[str, Any]:
    """Return what the connector tells of an answer."""
    return answer.kv_transfer_params["dejakv"]


def token_ids(answers: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the tokens of answers."""
    return [tuple(answer.outputs[0].token_ids) for answer in answers]


def save_model(folder: Path, shape: dict[str, Any], *, weights: bool) -> None:
    """Write a model of a shape with its tokenizer, with random weights or without any."""
    if weights:
        random_llama(shape, torch.device("cpu"), torch.float32).save_pretrained(folder)
    else:
        LlamaConfig(
            **shape,
            vocab_size=WORDS + 3,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def blend_prompts(tokens: int, seed: int, number: int = 0) -> tuple[list[str], str]:
    """Return donors, and a prompt of their passages in another order, with other words around."""
    passages = [words(tokens // PASSAGES - 40, seed * 100 + each) for each in range(PASSAGES)]
    donors = [
        " ".join([words(20, seed * 100 + 50 + each), ".", passage, words(15, 7)])
        for each, passage in enumerate(passages)
    ]
    turned = passages[number + 1 :] + passages[: number + 1]
    return donors, " ".join([words(40, seed * 100 + 70 + number), ".", *turned, words(24, 9)])


def check(note: Note) -> None:
    """Check hits, saves under load and blends of a small model in float32."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SMALL, weights=True)
        # Blocks for a few prompts alone, so that those of one are another's while it is saved.
        engine = Engine(
            Path(folder),
            {},
            dtype="float32",
            max_model_len=1024,
            num_gpu_blocks_override=64,
            block_size=32,
            max_num_seqs=8,
            gpu_memory_utilization=0.3,
        )
        for name, attempt in {
            "exact hits and late saves under load, vLLM": check_hits,
            "blend, vLLM": check_blend,
        }.items():
            try:
                note("check", name, f"right: {attempt(engine)}")
            # Whatever it raises: the page says so, and the rest runs.
            except Exception as error:
                note("check", name, f"WRONG: {type(error).__name__}: {error}"[:500])


def check_hits(engine: Engine) -> str:
    """Prompts that are saved while others take their blocks hit exactly, many at once."""
    prompts = [words(200 + 16 * number, number) for number in range(LOADED)]
    full = token_ids(engine.ask(prompts, "off"))
    engine.settle()
    saving = token_ids(engine.ask(prompts, "exact"))
    engine.settle()
    answers = token_ids(hits := engine.ask(prompts, "exact"))
    # A load that would save too little under load is refused: such a prompt hits when it is alone.
    places = [place for place, hit in enumerate(hits) if reuse_of(hit)["method"] != "exact"]
    engine.settle()
    for place in places:
        (hit,) = engine.ask([prompts[place]], "exact")
        (answers[place],) = token_ids([hit])
        if reuse_of(hit)["method"] != "exact":
            raise WrongAnswerError(f"a stored prompt did not hit: {reuse_of(hit)['reason']}")
    if saving != full or answers != full:
        raise WrongAnswerError("an answer is not that of full computation")
    return (
        f"{LOADED} stored prompts hit, {LOADED - len(places)} of them at once, with answers of "
        f"{ANSWER} tokens as full computation's (fp32)"
    )


def check_blend(engine: Engine) -> str:
    """A blend that recomputes every token answers as full computation does."""
    donors, target = blend_prompts(640, 3)
    full = token_ids(engine.ask([target], "off"))
    engine.settle()
    engine.ask(donors, "exact", 1)
    engine.settle()
    runner = engine.worker_side.blend_runner
    usual = runner.config
    runner.config = replace(usual, share=1.0)
    whole = engine.ask([target], "blend")
    runner.config = usual
    engine.settle()
    blend = engine.ask([target], "blend")
    for answer in (*whole, *blend):
        if reuse_of(answer)["method"] != "blend":
            raise WrongAnswerError(f"not blended: {reuse_of(answer)['reason']}")
    if token_ids(whole) != full:
        raise WrongAnswerError("with every token recomputed it is not full computation's answer")
    return (
        f"as full computation with all of {reuse_of(whole[0])['tokens_recomputed']} tokens"
        " recomputed;"
        f" by itself it recomputes {reuse_of(blend[0])['tokens_recomputed']}"
    )


def measure(note: Note, until: float, *, tiny: bool) -> None:
    """Measure times to the first token, one prompt at a time."""
    shape = SMALL if tiny else SHAPE_8B
    if not tiny and torch.cuda.mem_get_info()[0] < BLOCKS_8B:
        shape = shape | {"num_hidden_layers": shape["num_hidden_layers"] // 4}
        note("left out", f"the whole 8B shape: {shape['num_hidden_layers']} of its layers fit")
    lengths = TINY_LENGTHS if tiny else LENGTHS
    limits = {"max_bytes": STORE_BYTES, "memory_bytes": STORE_BYTES, "max_pending_bytes": 6 << 30}
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": lengths[-1] + 1000}
    # The process that waits for this one has some of the GPU, too.
    options["gpu_memory_utilization"] = 0.85
    if tiny:
        limits = {}
        options |= {"dtype": "float32", "num_gpu_blocks_override": 256, "block_size": 32}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), shape, weights=False)
        engine = Engine(Path(folder), limits, load_format="dummy", **options)
        engine.ask([words(64, 0)], "off", 1)

        def has_time(needed: float, tokens: int) -> bool:
            left = until - time.monotonic()
            if needed > left:
                note("left out", f"{tokens} tokens: {left:.0f} s left, {needed:.0f} s needed")
            return needed <= left

        for seed, tokens in lengths_in_time(tiny, has_time):
            measure_length(note, engine, tokens, seed)


def measure_length(note: Note, engine: Engine, tokens: int, seed: int) -> None:
    """Measure prompts of so many tokens: full prefill, vLLM's prefix cache, exact hit, blend."""

    def asked(prompt: str, mode: str) -> tuple[float, float, dict[str, Any]]:
        engine.longest_step = 0.0
        start = time.perf_counter()
        (answer,) = engine.ask([prompt], mode, 1)
        return time.perf_counter() - start, engine.longest_step, reuse_of(answer)

    def row(way: str, runs: Sequence[tuple[float, float, dict[str, Any]]], wanted: str) -> None:
        *_, last = runs[-1]
        missed = [each for *_, each in runs if each["method"] != wanted]
        line: dict[str, Any] = {
            "tokens": tokens,
            "way": way,
            "ms": median(seconds for seconds, _, _ in runs) * 1000,
            "longest step ms": median(step for _, step, _ in runs) * 1000,
        }
        if wanted == "blend":
            line["recomputed"] = last["tokens_recomputed"]
        if missed:
            line["note"] = f"{len(missed)} of {len(runs)} were not: {missed[0]['reason']}"
        note("row", line)

    prompts = [words(tokens, seed * 100 + number) for number in range(REPEATS)]
    row("full prefill", [asked(prompt, "off") for prompt in prompts], "none")
    row("prefix cache", [asked(prompt, "off") for prompt in prompts], "none")

    engine.settle()
    engine.ask(prompts, "exact", 1)
    engine.settle()
    row("exact hit", [asked(prompt, "exact") for prompt in prompts], "exact")

    engine.ask(blend_prompts(tokens, seed)[0], "exact", 1)
    engine.settle()
    blends = [asked(blend_prompts(tokens, seed, number)[1], "blend") for number in range(REPEATS)]
    # The first one checks the model, too.
    row("blend", blends[1:], "blend")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=("checks", "figures"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0)
    options = parser.parse_args(arguments)
    # The worker side is looked at, and steps are timed, so the engine is in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # GiB of KV cache where there is no GPU.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    with options.output.open("a", encoding="utf-8") as file:

        def note(*line: Any) -> None:
            print(*line, flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()

        if options.part == "checks":
            check(note)
        else:
            measure(note, began + options.seconds, tiny=options.tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())

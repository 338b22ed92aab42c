"""A long mixed run through one engine: no exact answer is ever wrong, and nothing grows.

Modes, tenants, blends, preemptions, aborts, resets, evictions, damaged and deleted stored states, all at once. CI runs a few rounds; `make soak`
half of `DEJAKV_SOAK_MINUTES`, 10,000 exactly served answers in 30 minutes of a core.
"""

import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.conftest import deadline, soak_rounds, soak_seed
from vllm import SamplingParams
from vllm_harness import BLENDING, EXTENSION, Engine, changed, greedy, running, segments, spoil, tokens, worker_side

BASES, ANSWER, BATCH = 24, 8, 24
MARGIN = 1e-3
"""Nats between the two likeliest tokens at each place of an answer. Nearer ones are a matter of rounding, which depends on the batch."""
BUDGET = 20_000_000
"""Of the store: about a tenth of what the prompts' state takes."""
OPTIONS: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,  # 2,048 tokens: requests wait for each other and are preempted
    "long_prefill_token_threshold": 128,
}
WISHES: tuple[dict[str, Any], ...] = (
    {"mode": "exact"}, {"mode": "exact"}, {"mode": "exact", "no_store": True}, {"mode": "off"}, {"mode": "blend"},
    {"mode": "blend"},
)  # fmt: skip
GROWTH_BYTES, GROWTH_COUNT = 48 << 20, 2


def prompts(rng: random.Random) -> Iterator[list[int]]:
    """Prompts that share beginnings, parts and most of their text."""
    bases = [tokens(rng.randrange(40, 600), rng.randrange(1 << 30)) for _ in range(BASES)]
    while True:
        base, other = rng.sample(bases, 2)
        kind = rng.choice(["same", "longer", "near", "cut", "joined"])
        if kind == "longer":
            base = base + tokens(rng.randrange(1, 60), rng.randrange(1 << 30))
        elif kind == "near":
            base = changed(base, 0.1, rng.randrange(1 << 30), keep_last=8)
        elif kind == "cut":
            base = base[: rng.randrange(20, len(base))]
        elif kind == "joined":
            base = other[-300:] + base[:300]
        yield base


def truths(rng: random.Random, count: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Prompts and their answers by vLLM alone, of those whose answers rounding does not decide."""
    asked, found = prompts(rng), dict[tuple[int, ...], tuple[int, ...]]()
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=2)
    with running(connector=False, **OPTIONS) as engine:
        while len(found) < count:
            ids = next(asked)
            (output,) = engine.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            two = [
                sorted((entry.logprob for entry in place.values()), reverse=True)
                for place in output.outputs[0].logprobs
            ]
            if min(values[0] - values[1] for values in two) >= MARGIN:
                found[tuple(ids)] = tuple(output.outputs[0].token_ids)
    return found


@dataclass
class Soak:
    """One engine, asked and disturbed round by round."""

    engine: Engine
    store: Path
    truth: dict[tuple[int, ...], tuple[int, ...]]
    rng: random.Random
    served: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    def round(self) -> None:
        """A batch of requests of which some are aborted, and then perhaps a reset or damage."""
        rng, llm = self.rng, self.engine.llm.llm_engine
        asked: dict[str, tuple[int, ...]] = {}
        for number in range(BATCH):
            name, ids, wish = f"{self.served['rounds']}-{number}", rng.choice(list(self.truth)), rng.choice(WISHES)
            prompt = {"prompt_token_ids": list(ids), "cache_salt": rng.choice(["one", "two"])}
            llm.add_request(name, prompt, greedy(ANSWER, **wish))
            asked[name] = ids
        ends = {name: rng.randrange(1, 60) for name in rng.sample(sorted(asked), BATCH // 8)}
        step = 0
        while llm.has_unfinished_requests():
            step += 1
            for output in llm.step():
                if output.finished and output.request_id in asked:
                    self._judge(output, asked.pop(output.request_id))
            if late := [name for name, end in ends.items() if end == step and name in asked]:
                llm.abort_request(late)
                self.served["aborted"] += len(late)
                for name in late:
                    del asked[name]
        assert not asked
        self.served["rounds"] += 1
        self._disturb()

    def _judge(self, output: Any, ids: tuple[int, ...]) -> None:
        told = output.kv_transfer_params["dejakv"]
        self.served[told["method"]] += 1
        if told["approximate"]:
            return
        self.served["exactly"] += 1
        if tuple(output.outputs[0].token_ids) != self.truth[ids]:
            self.wrong.append(f"{output.request_id}: {told}")

    def _disturb(self) -> None:
        what = self.rng.choice(["nothing", "nothing", "settle", "reset", "damage", "delete"])
        self.served[what] += 1
        if what == "settle":
            self.engine.settle()
        if what == "reset":
            self.engine.settle()
            self.engine.reset_prefix_cache()
        files = segments(self.store)
        if not files or what not in ("damage", "delete"):
            return
        for path in self.rng.sample(files, min(3, len(files))):
            if what == "delete":
                path.unlink(missing_ok=True)
            else:
                spoil(path, self.rng.random())


def held() -> tuple[int, int, int]:
    """Bytes in memory, threads and open files of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def soaked(
    folder: Path, more: Callable[[int], bool], count: int = 160
) -> tuple[Soak, list[tuple[int, int, int]], dict[str, float]]:
    """Rounds of so many prompts while `more(rounds)`, and what the process held after each."""
    rng = random.Random(soak_seed())
    truth = truths(rng, count)
    extra = {**BLENDING, "store_dir": str(folder), "max_bytes": BUDGET, "memory_bytes": 4_000_000, "min_new_tokens": 1}
    with running(extra=extra, worker_extension_cls=EXTENSION, **OPTIONS) as engine:
        soak, seen = Soak(engine, folder, truth, rng), list[tuple[int, int, int]]()
        while more(len(seen)):
            soak.round()
            seen.append(held())
        engine.settle()
        stats = worker_side().store.stats()
        assert stats.bytes <= BUDGET
        figures = {
            "evicted": sum(stats.evictions.values()),
            "preempted": engine.metrics()["vllm:num_preemptions"],
        }
    assert soak.wrong == []
    return soak, seen, figures


def test_a_short_mixed_run(tmp_path: Path) -> None:
    soak, _, figures = soaked(tmp_path, lambda rounds: rounds < 12, 60)
    assert soak.served["exactly"] > 100
    assert soak.served["exact"] >= 1
    assert soak.served["blend"] >= 1
    assert soak.served["aborted"] >= 1
    assert figures["evicted"] >= 1


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_long_mixed_run_is_never_wrong_and_grows_in_nothing(tmp_path: Path) -> None:
    ends, wanted = deadline(0.5), 10_000 * soak_rounds()
    soak: Soak | None = None

    def more(rounds: int) -> bool:
        return time.monotonic() < ends and rounds * BATCH < 2 * wanted

    soak, seen, figures = soaked(tmp_path, more)
    third = len(seen) // 3
    middle, last = seen[third : 2 * third], seen[2 * third :]
    print(
        f"{dict(soak.served)}, {figures}; memory, threads and files: {middle[0]} after a third, {last[-1]} at the end"
    )
    assert len(seen) >= 30
    for kind, allowed in enumerate((GROWTH_BYTES, GROWTH_COUNT, GROWTH_COUNT)):
        grown = median(entry[kind] for entry in last) - median(entry[kind] for entry in middle)
        assert grown <= allowed, f"{('memory', 'threads', 'files')[kind]} grew by {grown}"
    assert min(soak.served[name] for name in ("exact", "blend", "aborted", "reset", "damage", "delete")) >= 10
    assert figures["evicted"] >= 100
    assert figures["preempted"] >= 1

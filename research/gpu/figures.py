"""Figures of a device without vLLM: bandwidths, copies of state, and times to the first token."""

import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.engines.vllm.blend import fused
from dejakv.engines.vllm.blend.fused import FusedCopy
from dejakv.engines.vllm.blend.row_memory import dense_memory, pages_memory
from dejakv.engines.vllm.device import CudaCopies
from dejakv.models.cache_name import CACHE_NAME
from research.gpu.checks import no_kernel
from research.gpu.fused_cases import BLOCK, Case, paged_kv, rotary_tables
from research.gpu.models import tokenizer, words

Rows = list[dict[str, Any]]
REPEATS = 3
PASSAGES = 5
"""Donors of a blend, each with one of its passages."""
# Nothing is refused because it would not pay: what it takes is to be seen.
COSTS = (1e-2, 0.0, 1e-15, 1e-6)


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median time of a call with what it started on the device, once warm."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidths(device: torch.device, nbytes: int) -> Rows:
    """Measure copies of memory, in GB a second."""
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    hosts = {"pageable": torch.ones(nbytes, dtype=torch.uint8)}
    if device.type == "cuda":
        hosts["pinned"] = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    rows: Rows = []
    for kind, host in hosts.items():
        up = seconds_of(lambda host=host: on_device.copy_(host, non_blocking=True), device)
        down = seconds_of(lambda host=host: host.copy_(on_device, non_blocking=True), device)
        rows += [
            {"copy": f"{kind} memory to the device", "GB/s": nbytes / up / 1e9},
            {"copy": f"device to {kind} memory", "GB/s": nbytes / down / 1e9},
        ]
    other = torch.empty_like(on_device)
    within = seconds_of(lambda: other.copy_(on_device), device)
    return [
        *rows,
        {"copy": "within the device (read and written)", "GB/s": 2 * nbytes / within / 1e9},
    ]


def state_copies(device: torch.device, shape: dict[str, Any], tokens: int) -> Rows:
    """Measure what vLLM's worker side does with the state of so many tokens."""
    layers, heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    width = shape["hidden_size"] // shape["num_attention_heads"]
    case = Case("tokens first", heads, width, width, True, 1, torch.bfloat16)
    pages = tokens // BLOCK
    paged = paged_kv(case, device, layers, pages + 2)
    rotary = rotary_tables(case, device, layers, tokens + 100)
    blocks = tuple(range(2, pages + 2))
    raw = paged.copy_pages((blocks,), pages * BLOCK)
    order = np.random.default_rng(0).permutation(pages * BLOCK)
    index = np.stack([order, np.arange(len(order)), order, np.arange(len(order))])
    state = torch.empty(
        (2, len(order), layers, heads, width), dtype=case.dtype, device=device
    ).permute(0, 2, 3, 1, 4)

    ways = {"kernel": FusedCopy(paged, rotary)} if device.type == "cuda" else {}
    fallbacks = [why for way in ways.values() for why in way.take_fallbacks()]
    with patch.object(fused, "triton_kernels", no_kernel):
        ways["operations of torch"] = FusedCopy(paged, rotary)
    rows: Rows = []
    for name, way in ways.items():

        def draft(way: FusedCopy = way) -> None:
            way.copy(pages_memory(paged, raw), dense_memory(state), index)

        def begin(way: FusedCopy = way) -> None:
            way.write(state, 0, len(order), blocks)

        note = f" ({fallbacks[0]})" if fallbacks and name == "kernel" else ""
        for what, call in {
            "donors' pages to rows in order": draft,
            "rows to blocks": begin,
        }.items():
            seconds = seconds_of(call, device)
            rows.append({"state": f"{what}, {name}{note}", **_moved(raw.nbytes, seconds)})

    copies = paged.copies
    if isinstance(copies, CudaCopies):
        copies.reserve(2 * raw.nbytes)
        host = copies.host_memory((pages, paged.page_bytes)).tensor
        steps = {
            "save": lambda: copies.save(
                host,
                lambda begin, end, into: paged.copy_pages(
                    (blocks,), (end - begin) * BLOCK, begin, into
                ),
            ),
            "exact hit": lambda: copies.load(
                host, lambda part, begin: paged.put_pages((blocks,), part, begin)
            ),
        }
        for name, step in steps.items():
            whole = seconds_of(step, device)
            start = time.perf_counter()
            step()
            loop = time.perf_counter() - start
            synchronize(device)
            rows.append({"state": name, **_moved(raw.nbytes, whole), "engine loop ms": loop * 1000})
    return rows


def _moved(nbytes: int, seconds: float) -> dict[str, float]:
    return {"ms": seconds * 1000, "GB/s": nbytes / seconds / 1e9}


def _store_bytes() -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(48 << 30, free // 2)


class FirstTokens:
    """Times to the first token of one model, through transformers.

    Use it as a context, in which the model is attached.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device, self.tokenizer = model, device, tokenizer()
        self._records: list[dejakv.Record] = []
        # Memory for the donors' state, twice: that of the store and a copy under way.
        config = SemanticCacheConfig(reuse="blend", costs=COSTS, max_bytes=_store_bytes())
        self._attached = dejakv.attach(
            model, self.tokenizer, config, on_record=self._records.append
        )

    def __enter__(self) -> "FirstTokens":
        self._cache = self._attached.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._attached.__exit__(*error)

    def rows(self, tokens: int, seed: int) -> Iterator[dict[str, Any]]:
        """Measure prompts of so many tokens, in the four ways; yield each as it is known."""
        model, prompt = self.model, words(tokens, seed)
        inputs = self._inputs(prompt)
        options = {"max_new_tokens": 1, "do_sample": False}
        alone = type(model).generate

        full = seconds_of(lambda: alone(model, **inputs, **options), self.device)
        yield {"tokens": tokens, "way": "full prefill", "ms": full * 1000, "computed": tokens}

        prefix = self._prefix_seconds(inputs)
        yield {"tokens": tokens, "way": "prefix cache", "ms": prefix * 1000, "computed": 1}

        self._ask(prompt)
        self._cache.store.flush()
        hits = [self._ask(prompt) for _ in range(REPEATS + 1)][1:]
        yield self._row(tokens, "exact hit", [each[0] for each in hits], hits[-1][1])

        passages = [words(tokens // PASSAGES - 40, seed * 100 + n) for n in range(PASSAGES)]
        for number, passage in enumerate(passages):
            self._ask(" ".join([words(20, seed * 100 + 50 + number), ".", passage, words(15, 7)]))
        self._cache.store.flush()
        blends: list[tuple[float, Any]] = []
        for number in range(REPEATS):
            turned = passages[number + 1 :] + passages[: number + 1]
            blends.append(
                self._ask(
                    " ".join([words(40, seed * 100 + 70 + number), ".", *turned, words(24, 9)])
                )
            )
        yield self._row(tokens, "blend", [each[0] for each in blends[1:]], blends[-1][1])

    def _prefix_seconds(self, inputs: Any) -> float:
        """Measure the last token of a prompt behind the model's own cache of the others."""
        model = self.model
        with torch.no_grad():
            ids = inputs["input_ids"][:, :-1]
            past = model(ids, use_cache=True, logits_to_keep=1)[CACHE_NAME]

        def last_token() -> None:
            options = {"max_new_tokens": 1, "do_sample": False, CACHE_NAME: past}
            type(model).generate(model, **inputs, **options)
            past.crop(-1)

        return seconds_of(last_token, self.device)

    def _inputs(self, prompt: str) -> Any:
        return self.tokenizer(prompt, return_tensors="pt").to(self.device)

    def _ask(self, prompt: str) -> tuple[float, Any]:
        inputs = self._inputs(prompt)
        synchronize(self.device)
        start = time.perf_counter()
        self.model.generate(**inputs, max_new_tokens=1, do_sample=False)
        synchronize(self.device)
        return time.perf_counter() - start, self._records[-1]

    @staticmethod
    def _row(tokens: int, way: str, seconds: list[float], record: Any) -> dict[str, Any]:
        note = "" if record.reused_tokens else f"not reused: {record.reason}"
        row = {"tokens": tokens, "way": way, "ms": median(seconds) * 1000}
        return {**row, "computed": record.computed_tokens, **({"note": note} if note else {})}

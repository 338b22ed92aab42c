"""Ten faults of caches, each planted where such a bug would sit in our own engines, and runs of `dejakv verify` against it.

    python -m tests.verify.planted SERVER [FAULT ...]      # a row of docs/results/verify.md for each fault; none: a right server

SERVER is a model of `dejakv serve` (docs-lm, smollm2-135m, shapes-vlm), or vLLM with docs-lm: vllm- and a key of VLLM (in .venv-vllm)."""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv import identity
from dejakv.store import prefix_keys
from dejakv.store.base import StoredState
from dejakv.store.store import Store
from dejakv.verify import ClientSettings, VerifyResult, VerifySettings, verify_server

BLOCK = identity.BLOCK_TOKENS
STALE_AFTER = 60
"""Computed prompts after which the weights are others."""

# Seams of the store, under both engines: state is `[2, layers, heads, tokens, head_dim]`, or `[1, 1, 1, pages, bytes]` of vLLM.


def _loads(patch: pytest.MonkeyPatch, damage: Callable[[np.ndarray], np.ndarray]) -> None:
    """Damages each part that is read."""
    load = Store._load

    def damaged(self: Store, *arguments: Any) -> Any:
        parts = load(self, *arguments)
        return parts and [replace(part, tensor=replace(part.tensor, data=damage(part.tensor.data))) for part in parts]

    patch.setattr(Store, "_load", damaged)


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A read begins a row (in vLLM a page) too early."""
    _loads(patch, lambda data: np.roll(data, 1, axis=3))


def truncated(patch: pytest.MonkeyPatch) -> None:
    """A short read, of which nobody looks at the length: the second half stays empty."""

    def short(data: np.ndarray) -> np.ndarray:
        data = data.copy()
        data[:, :, :, -(data.shape[3] // 2) or 1 :] = 0
        return data

    _loads(patch, short)


def layers(patch: pytest.MonkeyPatch) -> None:
    """Layers in the order of their names as texts, or any other."""
    _loads(patch, lambda data: np.ascontiguousarray(data[:, ::-1]))


def scales(patch: pytest.MonkeyPatch) -> None:
    """8 bits with a scale for each part, read with the scale of the part before. Our own store has no such form: it is planted, too."""
    last = [1.0]

    def rescaled(data: np.ndarray) -> np.ndarray:
        if data.dtype == np.uint8:  # pages in fp8, whose scales are the model's: twice as large here
            import torch

            numbers = torch.from_numpy(data.copy()).view(torch.float8_e4m3fn)
            return (numbers.float() * 2).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        scale, last[0] = last[0], float(np.abs(data).max()) / 127
        return np.round(data / last[0]).astype(np.int8).astype(data.dtype) * scale

    _loads(patch, rescaled)


def half_written(patch: pytest.MonkeyPatch) -> None:
    """Each third state is written while its last block is still being computed."""
    put, count = Store._put, Counter[str]()

    def early(self: Store, state: StoredState) -> None:
        count["puts"] += 1
        if count["puts"] % 3 == 0:
            data = state.tensor.data.copy()
            if data.shape[0] == 1:
                data[..., -1, data.shape[-1] // 2 :] = 0
            else:
                data[:, :, :, -BLOCK // 2 :] = 0
            state = replace(state, tensor=replace(state.tensor, data=data))
        put(self, state)

    patch.setattr(Store, "_put", early)


# Seams of the keys.


def _keys(patch: pytest.MonkeyPatch, change: Callable[[str, str, list[int], tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Makes the keys of other partitions, epochs, tokens and spans than the prompt's."""
    build = prefix_keys.PrefixKeys.__init__

    def built(self: Any, partition: str, epoch: str, token_ids: Any, spans: Any = ()) -> None:
        ids = list(token_ids)
        build(self, *change(partition, epoch, ids, tuple(spans)))

    patch.setattr(prefix_keys.PrefixKeys, "__init__", built)


def tail(patch: pytest.MonkeyPatch) -> None:
    """Only the first half of a block is hashed."""

    def half(partition: str, epoch: str, ids: list[int], spans: tuple[Any, ...]) -> tuple[Any, ...]:
        return partition, epoch, [token if place % BLOCK < BLOCK // 2 else 0 for place, token in enumerate(ids)], spans

    _keys(patch, half)


def picture(patch: pytest.MonkeyPatch) -> None:
    """A picture's tokens are hashed, which are placeholders, and not its digest."""

    def blind(partition: str, epoch: str, ids: list[int], spans: tuple[Any, ...]) -> tuple[Any, ...]:
        return partition, epoch, ids, tuple(replace(span, digest="") for span in spans)

    _keys(patch, blind)


def stale(patch: pytest.MonkeyPatch) -> None:
    """Weights are written in place while the server runs, and nobody looks at them again."""
    from dejakv.engines.transformers import TransformersEngine
    from dejakv.engines.transformers.fingerprint.watch import ModelWatch

    compute, count = TransformersEngine.compute, Counter[str]()

    def computed(self: Any, *arguments: Any, **options: Any) -> Any:
        count["prompts"] += 1
        if count["prompts"] == STALE_AFTER:
            with self._lock:
                for weight in self.model.get_decoder().layers[0].parameters():
                    weight.data.mul_(1.25)
        return compute(self, *arguments, **options)

    patch.setattr(TransformersEngine, "compute", computed)
    patch.setattr(ModelWatch, "check", lambda self, **_: True)
    patch.setattr(ModelWatch, "is_unchanged", lambda self: True)


# Seams of vLLM's connector alone.


def salt(patch: pytest.MonkeyPatch) -> None:
    """The connector has one partition for all salts."""
    from dejakv.engines.vllm import encoder_connector
    from dejakv.engines.vllm import identity as names

    for module in (names, encoder_connector):
        patch.setattr(module, "partition_of", lambda _: identity.DEFAULT_PARTITION)


def lora(patch: pytest.MonkeyPatch) -> None:
    """The connector has one epoch for the model and all its adapters."""
    from dejakv.engines.vllm.identity import LoraAdapters

    epoch_of = LoraAdapters.epoch_of
    patch.setattr(LoraAdapters, "epoch_of", lambda self, _: epoch_of(self, None))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    fault.__name__: fault
    for fault in (salt, lora, picture, off_by_one, half_written, stale, tail, truncated, scales, layers)
}
IN_SERVE = tuple(name for name in FAULTS if name not in ("salt", "lora", "picture"))
"""Those that `dejakv serve` can have with a text model: it serves one model, and its tenants are API keys. `picture` needs a picture model."""


@contextmanager
def serve(model: str, fault: str = "", make_engine: Callable[[], Any] | None = None) -> Iterator[str]:
    """The address of `dejakv serve` in this process, with a fault."""
    from tests.documents import COSTS
    from tests.serving import Running

    from dejakv.engines.transformers import TransformersEngine
    from dejakv.server.settings import ServerSettings

    with pytest.MonkeyPatch.context() as patch:
        if fault:
            FAULTS[fault](patch)
        engine = make_engine() if make_engine else TransformersEngine.from_pretrained(model)
        with Running(ServerSettings(model=model, max_items=0, costs=COSTS), engine) as server:
            yield server.url


VLLM_PROGRAM = """
import multiprocessing, runpy, sys
import pytest
from vllm.model_executor.models import registry
from vllm.utils import system_utils
registry._run_in_subprocess = lambda inspect: inspect()
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
from tests.verify.planted import FAULTS
if sys.argv[1]:
    FAULTS[sys.argv[1]](pytest.MonkeyPatch())
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


VLLM: dict[str, list[str]] = {
    "prefix": [],
    "connector": ["--no-enable-prefix-caching"],
    "both": ["--num-gpu-blocks-override", "96"],
    "fp8": ["--no-enable-prefix-caching", "--kv-cache-dtype", "fp8"],
    "lora": ["--no-enable-prefix-caching", "--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"],
}
"""Arguments of vLLM's server by its caches; all but `prefix` have the connector. Few blocks, so that both caches serve."""


@contextmanager
def serve_vllm(caches: str, fault: str = "") -> Iterator[str]:
    """The address of vLLM's server with docs-lm, with a fault."""
    from tests.engines.vllm.test_vllm_lora import write_adapter
    from tests.engines.vllm.vllm_harness import server_flags, serving

    with tempfile.TemporaryDirectory() as folder:
        flags = server_flags({"store": f"{folder}/store"})
        place = flags.index("--middleware")
        flags = flags[:place] if caches == "prefix" else flags[:place] + flags[place + 2 :]
        if caches == "lora":
            flags += ["--lora-modules", f"tuned={write_adapter(Path(folder) / 'tuned', 3)}"]
        arguments = ["-c", VLLM_PROGRAM, fault, *flags, "--enable-prompt-tokens-details", *VLLM[caches]]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        with serving(Path(folder), arguments, environment, forking=False) as url:
            yield url


def run(url: str, seconds: float, workers: int = 4, **settings: Any) -> VerifyResult:
    return verify_server(ClientSettings(url), VerifySettings(seconds, workers, **settings), report=lambda _: None)


def row(server: str, fault: str, result: VerifyResult) -> str:
    """A row of the table of results."""
    wrong = Counter(each.kind for each in result.wrong)
    kinds = ", ".join(f"{kind} {count}" for kind, count in wrong.most_common())
    verdict = "wrong" if wrong else "no wrong answer"
    answers = f"{sum(wrong.values())} of {len(result.observations)}"
    requests = result.client.events["requests"]
    noise = f"{result.noise.largest:.2g}, {result.noise.limit:.2g}"
    named = fault or "none"
    return f"| {server} | `{named}` | {verdict} | {answers} | {kinds} | {noise} | {requests} | {result.seconds:.0f} |"


def main(server: str, *faults: str) -> None:
    seconds, runs = (float(os.environ.get(name, default)) for name, default in (("SECONDS_A_RUN", 60), ("RUNS", 1)))
    for fault in faults or ("",):
        with (
            serve_vllm(server.removeprefix("vllm-"), fault) if server.startswith("vllm") else serve(server, fault)
        ) as url:
            for _ in range(int(runs)):
                # New weights show in what was asked before and after them.
                result = run(url, seconds, **({"workers": 1} if fault == "stale" else {}))
                print(row(server, fault, result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

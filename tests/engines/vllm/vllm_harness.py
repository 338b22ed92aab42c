"""How the tests run vLLM: one engine at a time in this process, short greedy answers, everything else spelled out."""

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.reliability.crash_program import rows_and_files
from tests.services import free_ports

from dejakv.models import resolve
from dejakv.store.base import StoredState
from dejakv.store.open import open_store

DOCS, SHAPES = Path(resolve("docs-lm")), Path(resolve("shapes-vlm"))
VOCABULARY = range(8, 480)
THREADS, set_threads = torch.get_num_threads(), torch.set_num_threads
"""Of the process before its first engine, and what sets them: vLLM puts a function in its place that does nothing."""


@dataclass(frozen=True)
class Output:
    """One answer: its tokens, and how many prompt tokens vLLM did not compute."""

    tokens: tuple[int, ...]
    text: str
    cached: int
    prompt_tokens: int
    told: dict[str, Any]

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached


class Engine:
    """An offline vLLM with DejaKVConnector, or without it (`extra=None`)."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    def ask(
        self,
        prompts: Sequence[Any],
        *,
        max_tokens: int = 6,
        wish: dict[str, Any] | None | list[dict[str, Any] | None] = None,
        salt: str | None | list[str | None] = None,
        lora: Any = None,
        **sampling: Any,
    ) -> list[Output]:
        """Answers a batch of token-id lists or vLLM prompts, greedily and without an end-of-text."""
        from vllm import SamplingParams

        wishes = wish if isinstance(wish, list) else [wish] * len(prompts)
        salts = salt if isinstance(salt, list) else [salt] * len(prompts)
        inputs, params = [], []
        for prompt, one_wish, one_salt in zip(prompts, wishes, salts, strict=True):
            item = dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)}
            if one_salt is not None:
                item["cache_salt"] = one_salt
            inputs.append(item)
            extra = {"kv_transfer_params": {"dejakv": one_wish or {}}}  # an empty wish asks what became of the request
            params.append(
                SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **sampling)
            )
        results = self.llm.generate(inputs, params, use_tqdm=False, lora_request=lora)
        return [
            Output(
                tuple(result.outputs[0].token_ids),
                result.outputs[0].text,
                result.num_cached_tokens or 0,
                len(result.prompt_token_ids),
                ((result.kv_transfer_params or {}).get("dejakv") or {}),
            )
            for result in results
        ]

    def settle(self) -> None:
        """Steps the engine until every save is stored and confirmed."""
        worker = worker_side()
        for _ in range(400):
            while self.core.scheduler.has_requests():
                self.llm.llm_engine.step()  # a step of the core alone would lose its statistics
            if worker is not None:
                worker.saver.flush(10)
            if worker is None or not self.connector.scheduler_side.saves.pending:
                return
            self.ask([[9, 9, 9, 9]], max_tokens=1)  # a step carries the confirmation
        raise AssertionError("saves were never confirmed")

    def reset_prefix_cache(self) -> None:
        assert self.llm.reset_prefix_cache()

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found

    def close(self) -> None:
        with _collecting_nothing():
            self.llm.llm_engine.engine_core.shutdown()


class Steps:
    """What vLLM's model is given in each step, by its own scheduler and for blends."""

    def __init__(self, engine: Engine) -> None:
        self.tokens: list[int] = []
        self.then: Any = lambda: None
        self._step = engine.llm.llm_engine.step
        model = engine.core.model_executor.driver_worker.worker.model_runner.get_model()
        self.hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _model: Any, _given: Any, named: Any) -> None:
        self.tokens[-1] += named["positions"].shape[-1]
        self.then()

    def step(self) -> list[Any]:
        self.tokens.append(0)
        return self._step()


def worker_side() -> Any:
    """The worker side of the running engine's connector, None without one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group().worker_side if has_kv_transfer_group() else None


def recompute_all() -> None:
    """Has the running engine's blends recompute every token, which no setting does: it would not pay. Then an answer is that of full
    computation if all that the blend does is right."""
    blender = worker_side().blend_runner
    blender.config = replace(blender.config, share=1.0)


@contextlib.contextmanager
def recomputing_none() -> Iterator[None]:
    """Has them recompute nothing: whatever follows from such state is wrong."""
    blender = worker_side().blend_runner
    before = blender.config
    blender.config = replace(before, selector="similarity", share=0.0, by_need=False, offsets=False, tail=1)
    try:
        yield
    finally:
        blender.config = before


@contextlib.contextmanager
def running(
    model: Path | str = DOCS,
    extra: dict[str, Any] | None = None,
    *,
    connector: bool = True,
    multi: list[dict[str, Any]] | None = None,
    policy: str = "recompute",
    encoder: dict[str, Any] | None = None,
    transfer: Any = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine for the length of a `with`. `multi` are connectors below vLLM's MultiConnector, in ours's place, and `policy` that
    of all for loads that fail. `transfer` are settings in place of all these."""
    from vllm import LLM
    from vllm.config import ECTransferConfig, KVTransferConfig

    if encoder is not None:
        options["ec_transfer_config"] = ECTransferConfig(
            ec_connector="DejaKVEncoderConnector",
            ec_connector_module_path="dejakv.engines.vllm.encoder_connector",
            ec_role="ec_both",
            ec_connector_extra_config=encoder,
        )
    if multi is not None:
        transfer = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"connectors": multi},
        )
    elif connector and transfer is None:
        transfer = KVTransferConfig(
            kv_connector="DejaKVConnector",
            kv_connector_module_path="dejakv.engines.vllm.connector",
            kv_role="kv_both",
            # A busy machine is no miss here.
            kv_connector_extra_config={"lookup_timeout_s": 30, "load_timeout_s": 60, **(extra or {})},
        )
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "block_size": 32,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "num_gpu_blocks_override": 1024,  # 32,768 tokens: more is memory that each start would have to fill
        "worker_extension_cls": EXTENSION,
    }
    if "kv_cache_memory_bytes" in options:
        del defaults["num_gpu_blocks_override"]
    # vLLM's linear layers on a CPU keep compiled kernels by the size of their weights alone, and with another number of threads
    # oneDNN lays weights of that size out otherwise: a kernel of an earlier engine would read them wrong. N-grams' drafts set it.
    set_threads(THREADS)
    try:
        with _without_slow_steps():
            llm = LLM(str(model), kv_transfer_config=transfer, **(defaults | options))
    except BaseException as error:
        _forget()
        if isinstance(error, NotImplementedError) and "FP8 KV cache on CPU requires" in str(error):
            pytest.skip(str(error))
        raise
    engine = Engine(llm)
    try:
        yield engine
    finally:
        engine.close()
        engine.llm = None
        del llm
        _forget()


@contextlib.contextmanager
def _without_slow_steps() -> Iterator[None]:
    """Leaves out of a start what only a server of days needs: full garbage collections, and, where this process has
    replaced vLLM's kernels before, another search of all modules for them. What is there before the first engine is
    frozen: no collection looks at vLLM's modules again."""
    from vllm.platforms.cpu import CpuPlatform

    replace_kernels = CpuPlatform.register_triton_kernel_overrides

    # Not at each first start: an engine of two ranks replaces them in its workers alone.
    def replace_kernels_once(*_: object) -> None:
        if not _REPLACED_KERNELS:
            replace_kernels()
            _REPLACED_KERNELS.append(True)

    if not _STARTS:
        gc.collect()
        gc.freeze()
    with pytest.MonkeyPatch.context() as patch, _collecting_nothing():
        patch.setattr(CpuPlatform, "register_triton_kernel_overrides", replace_kernels_once)
        yield
    _STARTS.append(True)


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """vLLM collects garbage many times at each start and stop: `_forget` does it once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


_STARTS: list[bool] = []
_REPLACED_KERNELS: list[bool] = []

FORKING = """
import multiprocessing, runpy, sys
from vllm.model_executor.models import registry
from vllm.utils import system_utils
registry._run_in_subprocess = lambda inspect: inspect()
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs `-m MODULE ARGUMENTS` with an engine and workers that are forked, as on a GPU: no process imports vLLM again."""


@contextlib.contextmanager
def serving(
    folder: Path, arguments: Sequence[str], environment: dict[str, str], *, forking: bool = True
) -> Iterator[str]:
    """The address of an OpenAI server in processes of its own; its log is in `folder`. Without `forking`, each process is
    started anew, which takes half a minute more."""
    port = str(free_ports(1)[0])
    small = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--num-gpu-blocks-override", "1024"]
    start = ["-c", FORKING] if forking else []
    command = [sys.executable, "-W", "ignore", *start, *arguments, *small, "--host", "127.0.0.1", "--port", port]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                    break
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        print((folder / "log").read_text()[-20000:])
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _forget() -> None:
    """vLLM keeps connectors and process groups in globals, a failed start's too: the next engine wants none of them. Garbage is
    collected once; what the first engines imported is frozen then."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    with _collecting_nothing():
        cleanup_dist_env_and_memory()
    gc.collect()
    if len(_STARTS) < 3:
        gc.freeze()


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(count)]


def greedy(count: int, *, no_wish: bool = False, **wish: Any) -> Any:
    """Sampling of so many tokens, for requests that are not asked through `Engine.ask`."""
    from vllm import SamplingParams

    extra = None if no_wish else {"kv_transfer_params": {"dejakv": wish}}
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=extra)


def spoil(path: Path, place: float = 0.5) -> None:
    """Changes one byte of a file, so far into it."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 0xFF
    path.write_bytes(bytes(data))


def segments(folder: Path) -> list[Path]:
    """The files of a store that hold state."""
    return sorted(path for path in folder.rglob("segments/**/*") if path.is_file())


def changed(prompt: Sequence[int], share: float, seed: int, keep_last: int = 24) -> list[int]:
    """The prompt with a share of its tokens replaced, at its beginning and in a later passage: the rest is found as copied text."""
    rng = random.Random(seed)
    out = list(prompt)
    half, room = max(1, int(share * len(prompt)) // 2), (len(prompt) - keep_last) // 2
    start = room + rng.randrange(room - half)
    for place in (*range(half), *range(start, start + half)):
        out[place] = rng.choice([token for token in VOCABULARY if token != out[place]])
    return out


BLENDING = {
    "mode": "exact",
    "modes": ["off", "exact", "blend"],
    "blend_max_share": 1.0,
}
"""Requests may ask for blend; the guards are wide open, since what is tested is that state never leaks."""

EXTENSION = "dejakv.engines.vllm.bind.WorkerExtension"


def server_flags(settings: dict[str, Any]) -> list[str]:
    """Arguments of a server with the connector and our middleware, whose model is called `docs`."""
    kv = {
        "kv_connector": "DejaKVConnector",
        "kv_connector_module_path": "dejakv.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    flags = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(DOCS), "--served-model-name", "docs", "--block-size", "32",
        "--middleware", "dejakv.adopt.AdoptMiddleware", "--kv-transfer-config", json.dumps(kv),
    ]  # fmt: skip
    return [*flags, "--worker-extension-cls", EXTENSION] if "blend" in settings.get("modes", ()) else flags


# -- Engines of two tensor-parallel ranks on the CPU, and what each rank's store holds --

RANKS = ("tp-0-of-2", "tp-1-of-2")
ONE: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **ONE}


def of_two_cpus() -> dict[str, str]:
    """Environment: on the CPU backend each rank wants cores of its own, and starts are short without the warm-up."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{others[0] if others else first}", "VLLM_CPU_CI_ENV": "1"}


class _Forkserver:
    """In place of `multiprocessing`'s context for workers: they are forked from a process that has imported vLLM and run nothing.
    Each of them would take ten seconds for that otherwise."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *, target: Any, kwargs: dict[str, Any], **named: Any) -> Any:
        return self._context.Process(target=_with_environment, args=(dict(os.environ), target, kwargs), **named)


def _with_environment(environment: dict[str, str], target: Any, named: dict[str, Any]) -> None:
    """A worker has the environment of its start, not that in which vLLM was imported."""
    from vllm.model_executor.models import registry

    os.environ.clear()
    os.environ.update(environment)
    registry._run_in_subprocess = lambda inspect: inspect()
    target(**named)


def forkserver_id() -> int | None:
    """The process of which the ranks of engines in this process are children."""
    return multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def use_two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for engines that this process starts."""
    from vllm.v1.executor import multiproc_executor

    monkeypatch.setattr(multiproc_executor, "get_mp_context", _Forkserver)
    for name, value in of_two_cpus().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # it would go before `kv_cache_memory_bytes`


def confirmed(engine: Any) -> None:
    """Steps the engine until all ranks have answered for every save, and no blocks wait for one."""
    while engine.connector.scheduler_side.saves.pending:
        engine.ask([[9, 9, 9, 9]], max_tokens=2)  # a step carries the confirmation
    while engine.core.scheduler.has_requests():
        engine.llm.llm_engine.step()  # a step of the core alone would lose its statistics


def state_of(store: Path | str, rank: str, prompt: list[int]) -> tuple[str, StoredState]:
    """The name of a prompt's first object in one rank's store, and its stored state."""
    opened = open_store(f"{store}/{rank}")
    try:
        (meta,) = [meta for meta in opened.metas() if list(meta.token_ids) == prompt]
        found, record = opened.get(meta.id), opened._catalog.entry(meta.id, time.time())
        assert found is not None
        assert record is not None
        return opened._catalog.slices(record.n)[0].name, found
    finally:
        opened.close()


def held(store: Path, prompt: list[int]) -> list[bool]:
    """Of each rank, whether its store has the prompt, whole and readable."""
    found: list[bool] = []
    for rank in RANKS:
        deltas = open_store(store / rank)
        ids = [meta.id for meta in deltas.metas() if list(meta.token_ids) == prompt]
        found.append(bool(ids) and all(deltas.get(id) is not None for id in ids))
        deltas.close()
    return found


def leftovers(store: Path) -> list[str]:
    """What lies in the ranks' folders and belongs to no entry, once a store was opened on each; and entries without a file."""
    found: list[str] = []
    for rank in RANKS:
        open_store(store / rank).close()
        rows, files = rows_and_files(store / rank)
        found += [f"{rank}/{name}" for name, _ in rows.items() ^ files.items()]
        found += [f"{rank}/temporary/{path.name}" for path in (store / rank / "temporary").iterdir()]
    return found

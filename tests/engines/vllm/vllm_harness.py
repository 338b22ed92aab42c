"""How the tests run vLLM: one engine at a time in this process, short greedy answers, everything else spelled out."""

import contextlib
import gc
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from dejakv.models import resolve

DOCS, SHAPES = Path(resolve("docs-lm")), Path(resolve("shapes-vlm"))
VOCABULARY = range(8, 480)


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
    blender = worker_side().blender
    blender.config = replace(blender.config, share=1.0)


@contextlib.contextmanager
def recomputing_none() -> Iterator[None]:
    """Has them recompute nothing: whatever follows from such state is wrong."""
    blender = worker_side().blender
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
    **options: Any,
) -> Iterator[Engine]:
    """An engine for the length of a `with`. `multi` are connectors below vLLM's MultiConnector, in ours's place, and `policy` that
    of all for loads that fail."""
    from vllm import LLM
    from vllm.config import ECTransferConfig, KVTransferConfig

    transfer = None
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
    elif connector:
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
        "worker_extension_cls": EXTENSION,
    }
    try:
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
def serving(folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> Iterator[str]:
    """The address of an OpenAI server in processes of its own; its log is in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    small = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    command = [sys.executable, "-W", "ignore", *arguments, *small, "--host", "127.0.0.1", "--port", port]
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
        print((folder / "log").read_text()[-6000:])
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _forget() -> None:
    """vLLM keeps connectors and process groups in globals, a failed start's too: the next engine wants none of them."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


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

"""`vllm serve` in a process of its own, without the connector or with it in one of its modes."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from dejakv.errors import DejaKVError
from dejakv.models import resolve
from research.load.figures import BASE

STORE_BYTES = 24 << 30
FLAGS = {
    "--dtype": "float32", "--max-model-len": "2048", "--max-num-batched-tokens": "2048", "--max-num-seqs": "64", "--block-size": "32",
}  # fmt: skip
"""Of every server. A block has 128 tokens by default on a CPU, and prefix caching finds more with smaller ones."""


class VLLMServer:
    """A server that is being started. Used as a context; `wait` returns when it answers."""

    def __init__(self, model: str, arm: str, folder: Path, threads: int, kv_gib: int) -> None:
        """`folder`: for the connector's store and the server's log."""
        self.arm = arm
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        given = [word for pair in FLAGS.items() for word in pair]
        given += ["--model", str(resolve(model)), "--served-model-name", "served", "--port", str(port)]
        given += [
            "--enforce-eager",
            "--enable-prompt-tokens-details",
            "--no-enable-log-requests",
            *_connector(arm, folder),
        ]
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": str(kv_gib), "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        self._log = folder / f"{arm}.log"
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given]
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> "VLLMServer":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout_s: float = 600) -> None:
        """Returns when the server answers. Raises: DejaKVError with the end of its log if it does not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise DejaKVError(f"the server of {self.arm} did not start; its log ends: {self._log.read_text()[-1500:]}")

    def cpu_seconds(self) -> float:
        """Processor time of the server's processes so far."""
        import psutil

        own = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def settle(self, timeout_s: float = 300) -> None:
        """Returns when the server computes nothing and writes nothing: every save is stored. Raises: DejaKVError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            before = self.cpu_seconds()
            time.sleep(0.5)
            if self.cpu_seconds() - before < 0.05:
                return
        raise DejaKVError(f"the server of {self.arm} is still busy after {timeout_s:g} s without a request")

    def forget_prefixes(self) -> None:
        """Empties vLLM's own prefix cache; what the connector stored stays."""
        self.settle()
        if not httpx.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status().json()["success"]:
            raise DejaKVError(f"the server of {self.arm} holds blocks without a request")

    def counters(self) -> dict[str, float]:
        """The connector's counters, by `name` or `name: label`; empty without it."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                if sample.name.startswith("vllm:dejakv_") and sample.name.endswith("_total"):
                    labels = [value for name, value in sample.labels.items() if name in ("found", "reason")]
                    found[": ".join([sample.name[12:-6], *labels])] = sample.value
        return found


def _connector(arm: str, folder: Path) -> list[str]:
    if arm == BASE:
        return []
    from dejakv.engines.vllm.bind import EXTENSION
    from dejakv.experiments.vllm_engine import KV_CONNECTOR

    extra: dict[str, Any] = {"store_dir": str(folder / arm), "max_bytes": STORE_BYTES, "mode": arm}
    told = json.dumps({**KV_CONNECTOR, "kv_connector_extra_config": extra})
    return ["--kv-transfer-config", told, "--worker-extension-cls", EXTENSION]

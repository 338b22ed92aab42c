"""`vllm serve` in a process of its own, without the connector or with it in one of its modes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from dejakv.errors import DejaKVError
from dejakv.models import resolve
from research.load.figures import BASE

MODEL = "smollm2-135m"
CORE = str(min(os.sched_getaffinity(0)))
"""Of every server's forwards and of all threads beside them, the connector's too. vLLM's own
choice depends on the arm: it leaves one core to the scheduler and another one to a connector,
and where there are no more, a server with a connector takes all: two threads against one.
"""
STORE_BYTES = 24 << 30
FLAGS = (
    "--dtype", "float32", "--max-model-len", "2048", "--max-num-batched-tokens", "2048",
    "--max-num-seqs", "64", "--block-size", "32",
    "--enforce-eager", "--enable-prompt-tokens-details", "--no-enable-log-requests",
)  # fmt: skip
"""Of every server.

A block has 128 tokens by default on a CPU, and prefix caching finds more with smaller ones.
"""


class VLLMServer:
    """A server that is being started. Used as a context; `wait` returns when it answers."""

    def __init__(self, arm: str, folder: Path, kv_gib: int) -> None:
        """`folder`: for the connector's store and the server's log."""
        self.arm = arm
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *FLAGS,
            *_connector(arm, folder),
        ]
        command += [
            "--model",
            str(resolve(MODEL)),
            "--served-model-name",
            "served",
            arm,
            "--port",
            str(port),
        ]
        environment = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": str(kv_gib), "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": CORE,
        }  # fmt: skip
        self._log = folder / f"{arm}.log"
        with (
            self._log.open("w") as log
        ):  # in a session of its own: Ctrl-C reaches this process alone, which ends its servers
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> "VLLMServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self._process.terminate()
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its workers, too
            self._process.wait()
        if kind is not None and issubclass(kind, Exception):
            print(f"the log of {self.arm} ends:\n{self._log.read_text()[-3000:]}", file=sys.stderr)

    def wait(self, timeout_s: float = 600) -> None:
        """Returns when the server answers. Raises: DejaKVError if it does not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.HTTPError):
                if (
                    f'"{self.arm}"' in httpx.get(f"{self.url}/v1/models").text
                ):  # and no other server on that port
                    return
            time.sleep(0.5)
        raise DejaKVError(f"the server of {self.arm} did not start")

    def settle(self, timeout_s: float = 300) -> None:
        """Returns when the server computes nothing and writes nothing: every save is stored.

        Raises: DejaKVError after `timeout_s`, and for a server that ended.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            before = self._cpu_seconds()
            time.sleep(0.5)
            if self._cpu_seconds() - before < 0.05:
                return
        raise DejaKVError(
            f"the server of {self.arm} is still busy after {timeout_s:g} s without a request"
        )

    def _cpu_seconds(self) -> float:
        """Processor time of the server's processes so far."""
        import psutil

        if self._process.poll() is not None:
            raise DejaKVError(f"the server of {self.arm} ended")
        own = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def counters(self) -> dict[str, float]:
        """The connector's counters, by `name` or `name: label`; empty without it."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(
            httpx.get(f"{self.url}/metrics", timeout=60).text
        ):
            for sample in family.samples:
                if sample.name.startswith("vllm:dejakv_") and sample.name.endswith("_total"):
                    labels = [
                        value
                        for name, value in sample.labels.items()
                        if name in ("found", "reason")
                    ]
                    found[": ".join([sample.name[12:-6], *labels])] = sample.value
        return found


def _connector(arm: str, folder: Path) -> list[str]:
    if arm == BASE:
        return []
    from dejakv.engines.vllm.bind import EXTENSION
    from dejakv.experiments.vllm_engine import KV_CONNECTOR

    extra = {
        "store": str(folder / arm),
        "max_bytes": STORE_BYTES,
        "mode": arm,
        "unlabelled_answers": True,
    }
    told = json.dumps({**KV_CONNECTOR, "kv_connector_extra_config": extra})
    return ["--kv-transfer-config", told, "--worker-extension-cls", EXTENSION]

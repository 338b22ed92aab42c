"""A sentence encoder in a process of its own: while it works, the interpreter of this process is free.

`python -m dejakv.vectors.process NAME THREADS PARENT` reads texts from its standard input and writes their vectors to its standard
output, until that closes or its parent ends. A message is two lengths (little-endian u32), a JSON object and raw bytes; nothing is
unpickled.
"""

import importlib.util
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, cast

import numpy as np

from dejakv.errors import DejaKVError, InputError, MissingExtraError, ModelError
from dejakv.vectors.base import Vector, without_encoder

log = logging.getLogger("dejakv.vectors")

START_S = 120.0
ANSWER_S = 60.0
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Seconds from a death to the next start, doubled with each."""
PARENT_CHECK_S = 1.0
MOST_BYTES = 256 << 20
"""Largest part of a message."""
_LENGTHS = struct.Struct("<II")


class Broken(Exception):
    """The other side is gone, or sent no message."""


class EncoderProcess:
    """Runs a `SentenceTransformerEncoder` in another process, one call after the other. Thread-safe.

    threads  torch threads of that process
    deaths   how often it ended by itself, failed to start, or was killed because it did not answer

    After a death calls raise until the process is started again: a second later at the soonest, and twice as late after each further
    death. It ends with `close`, and with this process however that ends.

    Raises: MissingExtraError without the package; ModelError if the model cannot be loaded, if the process has ended or does not
    answer, or if a new start loads another model.
    """

    def __init__(self, name_or_path: str, *, threads: int = 1) -> None:
        if importlib.util.find_spec("sentence_transformers") is None:
            purpose = f"the encoder {name_or_path!r}"
            raise MissingExtraError("sentence-transformers", "embed", purpose, without_encoder("index_encoder"))
        self.name = name_or_path
        self.deaths = 0
        self.fingerprint, self.dim = "", 0
        self._threads = threads
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = None
        self._not_before = 0.0
        self._closed = False
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
            except BaseException:  # interrupted: the pending answer must not be taken for the next one
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
        command = [sys.executable, "-m", "dejakv.vectors.process", self.name, str(self._threads), str(os.getpid())]
        env = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONSAFEPATH"] = "1"  # no module is taken from the working folder
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._process, self._end = process, weakref.finalize(self, _end, process, os.getpid())
        try:
            hello, _ = self._ask(process, None, START_S)
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

    @staticmethod
    def _ask(
        process: "subprocess.Popen[bytes]", fields: dict[str, Any] | None, seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        """Sends a message, if one is given, and waits for the answer. A silent process is killed, which closes its pipes."""
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()
        timer = threading.Timer(seconds, lambda: (late.set(), process.kill()))
        timer.daemon = True
        timer.start()
        try:
            if fields is not None:
                send(process.stdin, fields)
            return receive(process.stdout)
        except Broken as error:
            if late.is_set():
                raise Broken("no answer in time") from error
            raise
        finally:
            timer.cancel()

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
    """Kills the process and reaps it. A forked child of its owner leaves it alone."""
    if os.getpid() != owner:
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was not sent yet
            if pipe is not None:
                pipe.close()
    process.wait()


def send(pipe: IO[bytes], fields: dict[str, Any], body: bytes = b"") -> None:
    """Writes one message. Raises: Broken."""
    text = json.dumps(fields).encode()
    if max(len(text), len(body)) > MOST_BYTES:
        raise Broken(f"a message of {len(text) + len(body)} bytes is too long")
    try:
        pipe.write(_LENGTHS.pack(len(text), len(body)) + text + body)
        pipe.flush()
    except (OSError, ValueError) as error:
        raise Broken("the other side is gone") from error


def receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """Reads one message. Raises: Broken."""
    text_length, body_length = _LENGTHS.unpack(_read(pipe, _LENGTHS.size))
    if max(text_length, body_length) > MOST_BYTES:
        raise Broken("a message that is too long")
    text, body = _read(pipe, text_length), _read(pipe, body_length)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Broken("a message that is no JSON") from error
    if not isinstance(fields, dict):
        raise Broken("a message that is no object")
    return cast(dict[str, Any], fields), body


def _read(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise Broken("the other side is gone")
    return data


def main(name: str, threads: int, parent: int) -> None:
    """Serves one encoder until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent, which ends this process
    texts, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get among the messages
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    from dejakv.vectors.text import SentenceTransformerEncoder

    try:
        encoder = SentenceTransformerEncoder(name, threads=threads)
    except DejaKVError as error:
        send(answers, {"error": str(error)})
        return
    send(answers, {"fingerprint": encoder.fingerprint, "dim": encoder.dim})
    while True:
        asked = receive(texts)[0]["texts"]
        try:
            vectors = encoder.encode_many(asked)
        except InputError as error:
            send(answers, {"refused": str(error)})
        except Exception as error:  # it may be this text's fault alone
            send(answers, {"error": f"{type(error).__name__}: {error}"})
        else:
            send(answers, {}, np.asarray(vectors, "<f4").tobytes())


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone: the pipe may be held open by a child that the parent has forked."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except Broken:
        sys.exit(0)  # the parent has closed the pipe

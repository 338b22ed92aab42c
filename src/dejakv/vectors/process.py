"""A sentence encoder in a process of its own: while it works, the interpreter of this process is free.

`python -m dejakv.vectors.process NAME THREADS PARENT SOCKET` answers texts with their vectors, until the socket closes or its parent
ends. A message is a JSON object, and vectors follow theirs as raw bytes; nothing is unpickled.
"""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dejakv.errors import DejaKVError, InputError, MissingExtraError, ModelError
from dejakv.vectors.base import Vector, without_encoder

log = logging.getLogger("dejakv.vectors")

START_S = 120.0
ANSWER_S = 60.0
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
PARENT_CHECK_S = 1.0
MOST_BYTES = 256 << 20
"""Largest message."""


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
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._end: Any = None
        self._not_before = 0.0
        self._closed = False
        with self._lock:
            self._start()

    def encode(self, text: str) -> Vector:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[Vector]:
        with self._lock:
            self._ready()
            try:
                answer, body = self._ask({"texts": list(texts)}, ANSWER_S)
                if "refused" not in answer and "error" not in answer:
                    return self._vectors(body, len(texts))
            except Broken as error:
                raise self._died(str(error)) from error
            except BaseException:  # interrupted: the pending answer must not be taken for the next one
                self._stop()
                raise
            if "refused" in answer:
                raise InputError(str(answer["refused"]))
            raise ModelError(f"the encoder {self.name!r} failed on a text: {answer['error']}")

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

    def _ready(self) -> None:
        """Sees to a running process."""
        if self._closed:
            raise ModelError(f"the encoder {self.name!r} is closed")
        if self._running is not None and self._running[0].poll() is not None:
            raise self._died("it has ended")
        if self._running is None:
            wait = self._not_before - time.monotonic()
            if wait > 0:
                raise ModelError(
                    f"the process of the encoder {self.name!r} has ended; it is started again in {wait:.0f} s"
                )
            self._start()

    def _start(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "dejakv.vectors.process", self.name, str(self._threads), str(os.getpid())]
        env = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONSAFEPATH"] = "1"  # no module is taken from the working folder
        socket = theirs.fileno()
        process = subprocess.Popen([*command, str(socket)], stdin=subprocess.DEVNULL, pass_fds=[socket], env=env)
        theirs.close()
        self._running, self._end = (process, ours), weakref.finalize(self, _end, process, ours, os.getpid())
        try:
            hello, _ = self._ask(None, START_S)
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

    def _ask(self, fields: dict[str, Any] | None, seconds: float) -> tuple[dict[str, Any], bytes]:
        """Sends a message, if one is given, and waits for the answer. A silent process is killed, which closes its socket.

        Raises: Broken."""
        assert self._running is not None
        process, pipe = self._running
        late = threading.Event()
        timer = threading.Timer(seconds, lambda: (late.set(), process.kill()))
        timer.daemon = True
        timer.start()
        try:
            if fields is not None:
                pipe.send_bytes(json.dumps(fields).encode())
            answer: dict[str, Any] = json.loads(pipe.recv_bytes(MOST_BYTES))
            return answer, pipe.recv_bytes(MOST_BYTES) if not answer else b""
        except (EOFError, OSError, ValueError) as error:
            raise Broken("no answer in time" if late.is_set() else "the other side is gone") from error
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
        self._running = self._end = None


def _end(process: "subprocess.Popen[bytes]", pipe: Connection, owner: int) -> None:
    """Kills the process and reaps it. A forked child of its owner leaves it alone."""
    if os.getpid() == owner:
        process.kill()
        pipe.close()
        process.wait()


def main(name: str, threads: int, parent: int, socket: int) -> None:
    """Serves one encoder until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent, which ends this process
    os.dup2(2, 1)  # what libraries print is no output of the parent's
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    from dejakv.vectors.text import SentenceTransformerEncoder

    pipe = Connection(socket)

    def say(**fields: Any) -> None:
        pipe.send_bytes(json.dumps(fields).encode())

    try:
        encoder = SentenceTransformerEncoder(name, threads=threads)
    except DejaKVError as error:
        say(error=str(error))
        return
    say(fingerprint=encoder.fingerprint, dim=encoder.dim)
    while True:
        asked = json.loads(pipe.recv_bytes(MOST_BYTES))["texts"]
        try:
            vectors = encoder.encode_many(asked)
        except InputError as error:
            say(refused=str(error))
        except Exception as error:  # it may be this text's fault alone
            say(error=f"{type(error).__name__}: {error}")
        else:
            say()
            pipe.send_bytes(np.asarray(vectors, "<f4").tobytes())


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone: the socket may be held open by a child that the parent has forked."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    except (EOFError, OSError):
        sys.exit(0)  # the parent has closed the socket

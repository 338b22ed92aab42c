"""The process of an encoder: `python -m dejakv.encoders.child NAME THREADS PARENT`. It reads texts from its standard input and
writes their vectors to its standard output (`frames`), until that ends or its parent does."""

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from dejakv.encoders.frames import Broken, receive, send
from dejakv.errors import DejaKVError, InputError

_LOOKS_EVERY_S = 1.0


def main(name: str, threads: int, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent, which ends this process
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not get among the messages
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        from dejakv.encoders.text import SentenceTransformerEncoder

        encoder = SentenceTransformerEncoder(name, threads=threads)
    except DejaKVError as error:
        send(answers, {"error": str(error)})
        return
    send(answers, {"fingerprint": encoder.fingerprint, "dim": encoder.dim})
    while True:
        message, _ = receive(0)
        send(answers, *_answer(encoder, message))


def _answer(encoder: Any, message: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    try:
        vectors = encoder.encode_many(message["texts"])
    except InputError as error:
        return {"refused": str(error)}, b""
    except Exception as error:  # it may be this text's fault alone
        return {"error": f"{type(error).__name__}: {error}"}, b""
    rows = np.stack(vectors) if vectors else np.empty((0, encoder.dim), np.float32)
    return {"rows": len(vectors)}, rows.astype("<f4").tobytes()


def _leave_with(parent: int) -> None:
    """Ends this process when its parent is gone: the pipe may be held open by a child that the parent has forked."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_EVERY_S)
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except Broken:
        sys.exit(0)  # the parent has closed the pipe

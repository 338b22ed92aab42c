"""A process that reads hostile stores, and what is wrong with what it notes."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import IO, Any

SECONDS = 30.0
"""Until a process is stopped that has noted nothing."""
SLOWEST = 10.0
"""Seconds of one operation of a store that count as bounded."""
_TAIL = 200


@dataclass(frozen=True)
class Read:
    """`noted` as `reading.read` returns it; `failed`: how the process ended if it has no notes."""

    noted: Mapping[str, Any]
    failed: str = ""


def read_in_children(module: str, places: Sequence[str], ids: Sequence[str]) -> list[Read]:
    """What `python -m module IDS` notes of each place, in a process with the import path of this one; another process goes on
    after a place at which one has failed."""
    found: list[Read] = []
    while len(found) < len(places):
        found += _read(module, places[len(found) :], ids)
    return found


def _read(module: str, places: Sequence[str], ids: Sequence[str]) -> Iterator[Read]:
    """The notes of one process, until it fails or is done."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    lines: Queue[bytes] = Queue()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(list(ids)), *places],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment,
        )  # fmt: skip
        reader = threading.Thread(target=_lines, args=(process, lines), daemon=True)
        reader.start()
        try:
            for _ in places:
                try:
                    line = lines.get(timeout=SECONDS)
                except Empty:
                    yield Read({}, f"it hung for {SECONDS:g} seconds")
                    return
                if not line:
                    yield Read({}, f"it ended with {process.wait()}: {_last_line(errors)}")
                    return
                yield Read(json.loads(line))
        finally:
            process.kill()
            process.wait()
            reader.join()


def _lines(process: "subprocess.Popen[bytes]", lines: "Queue[bytes]") -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line)
    lines.put(b"")


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    said = errors.read().decode("utf-8", "replace").strip().splitlines()
    return said[-1][:_TAIL] if said else "no message"


def faults_of(found: Read, right: Mapping[str, str], owners: Mapping[str, str], memory: int) -> list[str]:
    """What is wrong: no notes, an answer that is not the chunk that was stored, another's description, time, memory.

    right   the digest of each chunk, by id; `owners` its partition
    memory  bytes that the process may have needed at the worst moment
    """
    if found.failed:
        return [found.failed]
    noted, faults = found.noted, list[str]()
    for id, digest in noted["answers"].items():
        if digest is not None and digest != right[id]:
            faults.append("a chunk was returned that is not the one that was stored")
    for id, described in noted["described"].items():
        if described is not None and described != [id, owners[id]]:
            faults.append("a description of another chunk or partition was returned")
    if noted["mistyped"]:
        faults.append(f"descriptions were returned with a wrong {', '.join(sorted(set(noted['mistyped'])))}")
    if noted.get("added") is False:
        faults.append("a chunk that was stored afterwards came back as another one")
    if noted["slowest"] > SLOWEST:
        faults.append(f"an operation took {noted['slowest']:.1f} seconds")
    if noted["peak"] > memory:
        faults.append(f"{noted['peak'] >> 20} MiB of memory were needed, {memory >> 20} MiB are allowed")
    return faults

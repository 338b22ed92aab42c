"""A process that reads a hostile store, and what is wrong with how it ended."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 60.0
"""Until a process is stopped."""
SLOWEST = 10.0
"""Seconds of one operation of a store that count as bounded."""
_TAIL = 200


@dataclass(frozen=True)
class Read:
    """`noted` as `reading.read` returns it; `failed`: how the process ended if it has no notes."""

    noted: Mapping[str, Any]
    failed: str = ""


def read_in_child(module: str, place: str, ids: Sequence[str]) -> Read:
    """Runs `python -m module PLACE IDS` with the import path of this process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    line = [sys.executable, "-m", module, place, json.dumps(list(ids))]
    try:
        done = subprocess.run(line, capture_output=True, env=environment, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Read({}, f"it hung for {SECONDS:g} seconds")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode or not lines:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        return Read({}, f"it ended with {done.returncode}: {last[0][:_TAIL]}")
    return Read(json.loads(lines[-1]))


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
    if noted.get("added") is False:
        faults.append("a chunk that was stored afterwards came back as another one")
    if noted["slowest"] > SLOWEST:
        faults.append(f"an operation took {noted['slowest']:.1f} seconds")
    if noted["peak"] > memory:
        faults.append(f"{noted['peak'] >> 20} MiB of memory were needed, {memory >> 20} MiB are allowed")
    return faults

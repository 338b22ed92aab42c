"""Whatever happens to the store or to the process: every request is answered, and nothing torn is served."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from vllm_harness import running, tokens, worker_side

from dejakv.engines.vllm import compat_callers
from dejakv.errors import ConfigError, StoreError
from dejakv.experiments.vllm_engine import KV_CONNECTOR

A = tokens(501, 51)
MORE = [tokens(301, seed) for seed in range(52, 58)]

KILLED = """
import os, sys, threading
sys.path.insert(0, {here!r})
import vllm_harness as harness
from dejakv.store import objects
write = objects.os.write

def half(descriptor, data):
    if not os.readlink(f"/proc/self/fd/{{descriptor}}").endswith(".safetensors"):
        return write(descriptor, data)
    write(descriptor, data[: len(data) // 2])
    print("HALF", flush=True)
    threading.Event().wait()

objects.os.write = half
with harness.running(extra={{"store_dir": {store!r}}}) as engine:
    engine.ask([harness.tokens(501, 51)], max_tokens=64)
    print("ASKED", flush=True)
    harness.worker_side().saver.flush()
"""


def _kill_while_saving(store):
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED.format(here=here, store=store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ,
    )
    try:
        for line in process.stdout:
            if line.strip() == "HALF":
                break
        else:
            raise AssertionError("the engine never began to save")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)


def test_faults(tmp_path):
    """An engine killed in the middle of a save; a store that is corrupt, full, or gone: answered, and counted as misses."""
    store = tmp_path / "store"
    _kill_while_saving(str(store))
    assert [path for path in store.rglob("temporary/*") if path.is_file()], "a file was half written"
    assert not [path for path in store.rglob("segments/**/*") if path.is_file()]

    with running(extra={"store_dir": str(store), "min_new_tokens": 1, "memory_bytes": 0}) as engine:
        (truth,) = engine.ask([A])
        assert truth.cached == 0
        assert truth.told["method"] == "none"
        engine.settle()
        engine.reset_prefix_cache()
        (again,) = engine.ask([A])
        assert again.told["method"] == "exact"
        assert again.tokens == truth.tokens

        for chunk in store.rglob("segments/**/*"):
            if chunk.is_file():
                data = bytearray(chunk.read_bytes())
                data[len(data) // 2] ^= 0xFF
                chunk.write_bytes(bytes(data))
        engine.reset_prefix_cache()
        (corrupt,) = engine.ask([A])
        assert corrupt.tokens == truth.tokens
        assert corrupt.told["method"] == "none"
        assert "cannot be read" in corrupt.told["reason"]
        engine.settle()

        answers = engine.ask(MORE)
        engine.settle()
        engine.reset_prefix_cache()
        shutil.rmtree(store)
        gone = engine.ask([A, *MORE])
        assert [output.tokens for output in gone] == [truth.tokens, *(output.tokens for output in answers)]
        assert all(output.told["method"] == "none" for output in gone)
        engine.ask(MORE[:2])
        metrics = engine.metrics()
    assert sum(value for name, value in metrics.items() if name.startswith("vllm:dejakv_load_failures")) >= 1

    small = {"store_dir": str(tmp_path / "small"), "max_bytes": 100_000}
    with running(extra=small) as engine:
        engine.ask([A])
        worker_side().saver.flush(10)
        (full,) = engine.ask([[*A[:-1], 9]])
        assert full.tokens
        assert not list(worker_side().store.metas())
        assert sum(v for n, v in engine.metrics().items() if n.startswith("vllm:dejakv_saves_dropped")) >= 1


def test_hanging_store(tmp_path):
    """A store that does not answer costs the load's time limit, then the prompt is computed; saves beyond the backlog are
    dropped and the engine goes on."""
    with running(
        extra={"store_dir": str(tmp_path), "memory_bytes": 0, "load_timeout_s": 0.3, "max_pending_bytes": 5_000_000}
    ) as engine:
        (truth,) = engine.ask([A])
        engine.settle()
        engine.reset_prefix_cache()
        store = worker_side().store
        real_get, real_put = store.get_parts, store.put
        go = threading.Event()
        store.get_parts = lambda id, rows=None: go.wait() and real_get(id, rows)
        (output,) = engine.ask([A])
        assert output.tokens == truth.tokens
        assert "took longer than 0.3 s" in output.told["reason"]
        store.get_parts = real_get
        store.put = lambda chunk: go.wait() and real_put(chunk)
        assert all(output.tokens for output in engine.ask(MORE))
        engine.ask([A[:40]])
        dropped = {n: v for n, v in engine.metrics().items() if n.startswith("vllm:dejakv_saves_dropped")}
        assert sum(dropped.values()) >= 1
        go.set()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_capture_failure_is_a_miss(tmp_path, error, caplog):
    """No memory for the copy of a prompt's state: the prompt is answered, the save is counted, the cause is in the log, and the
    next one is stored. What is no lack of memory is not hidden."""
    with running(extra={"store_dir": str(tmp_path)}) as engine:
        paged = worker_side().paged
        copy_pages = paged.copy_pages

        def fail(*args):
            raise error

        paged.copy_pages = fail
        (output,) = engine.ask([A], max_tokens=8)
        assert len(output.tokens) == 8
        assert "no memory to copy the state of a prompt of 501 tokens" in caplog.text
        assert engine.metrics()["vllm:dejakv_saves_dropped"] == 1
        paged.copy_pages = copy_pages
        engine.settle()
        for expected in ("none", "exact"):
            engine.reset_prefix_cache()
            (again,) = engine.ask([A])
            assert again.told["method"] == expected
            engine.settle()

        error = IndexError("a fault of ours")
        paged.copy_pages = fail
        with pytest.raises(IndexError, match="a fault of ours"):
            engine.ask(MORE[:1], max_tokens=8)


def test_multi_connector_survives_damage(tmp_path):
    """Below vLLM's MultiConnector, whose own default fails a request when its state cannot be read."""
    ours = {
        **KV_CONNECTOR,
        "kv_connector_extra_config": {"store_dir": str(tmp_path), "memory_bytes": 0, "lookup_timeout_s": 30},
    }
    with running(multi=[ours]) as engine:
        (truth,) = engine.ask([A], max_tokens=8)
        while not list(tmp_path.rglob("segments/**/*")):
            time.sleep(0.1)
        for _ in range(3):
            engine.ask([[9, 9, 9, 9]], max_tokens=2)  # a step carries the confirmation
        engine.reset_prefix_cache()
        (again,) = engine.ask([A], max_tokens=8)
        assert again.told["method"] == "exact"
        for chunk in tmp_path.rglob("segments/**/*"):
            if chunk.is_file():
                data = bytearray(chunk.read_bytes())
                data[len(data) // 2] ^= 0xFF
                chunk.write_bytes(bytes(data))
        engine.reset_prefix_cache()
        (damaged,) = engine.ask([A], max_tokens=8)
        assert damaged.tokens == truth.tokens
        assert "cannot be read" in damaged.told["reason"]


def test_a_connector_outside_of_a_scheduler_is_refused():
    with pytest.raises(ConfigError, match="no scheduler makes this connector"):
        compat_callers.calling_scheduler()


def test_bad_settings_stop_the_start(tmp_path):
    """A clear error at start, before any request."""
    cases = [
        ({"mode": "fuzzy"}, ConfigError, "choose one of exact, blend"),
        ({"store": "x"}, ConfigError, "unknown key 'store'"),
        ({"blend_share": 2}, ConfigError, "a number from 0 to 1"),
    ]
    for extra, error, words in cases:
        with pytest.raises(error, match=words), running(extra=extra):
            pass
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises((StoreError, ConfigError)), running(extra={"store_dir": str(file / "below")}):
        pass

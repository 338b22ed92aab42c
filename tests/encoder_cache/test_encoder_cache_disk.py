"""Outputs on disk: restarts, damage, other epochs, other processes, slow disks."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from dejakv.encoder_cache import VisualKVCache
from dejakv.store.base import StoredState
from dejakv.store.objects import MemoryObjects
from dejakv.store.store import Store


def picture(value=1.0, rows=4):
    return np.full((rows, 8), value, np.float32)


def opened(folder, **settings):
    return VisualKVCache(disk=folder, **settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(32.0).reshape(4, 8).T.astype(">f2", order="F"),
        lambda: torch.arange(24).reshape(2, 3, 4).transpose(1, 2).to(torch.bfloat16),
    ],
    ids=["numpy", "torch"],
)
def test_a_restart_keeps_the_outputs(tmp_path, make):
    with opened(tmp_path / "c") as cache:
        first = cache.view("e", "p").get_or_compute("h", "image", make, resolution=(9, 7))
    with opened(tmp_path / "c") as cache:
        view = cache.view("e", "p")
        again = view.get_or_compute("h", "image", pytest.fail)
        assert type(again) is type(first)
        assert (again.dtype, again.shape) == (first.dtype, first.shape)
        assert bool((again == first).all())
        block = view.lookup("h")
        assert block.resolution == (9, 7)
        assert block.encoder_seconds is not None
        stats = view.stats()
        assert (stats.hits, stats.misses, stats.disk_hits, stats.encoder_runs) == (2, 0, 1, 0)
        assert stats.encoder_seconds_saved > 0


@pytest.mark.parametrize("damage", ["flip a bit", "truncate", "empty", "remove"])
def test_a_damaged_entry_is_a_counted_miss_and_is_computed_again(tmp_path, damage):
    with opened(tmp_path / "c") as cache:
        cache.view("e", "p").store("h", "image", picture())
    (file,) = tmp_path.glob("c/**/*.safetensors")
    data = bytearray(file.read_bytes())
    with opened(tmp_path / "c") as cache:
        if damage == "remove":
            file.unlink()
        else:
            data[-3] ^= 1
            file.write_bytes({"flip a bit": bytes(data), "truncate": bytes(data[:-9]), "empty": b""}[damage])
        view = cache.view("e", "p")
        assert view.get_or_compute("h", "image", lambda: picture(2))[0, 0] == 2
        stats = view.stats()
        assert (stats.disk_corrupt, stats.misses, stats.encoder_runs) == (1, 1, 1)
    with opened(tmp_path / "c") as cache:
        assert cache.view("e", "p").get_or_compute("h", "image", pytest.fail)[0, 0] == 2


def test_a_description_that_does_not_fit_is_a_counted_miss(tmp_path):
    with opened(tmp_path / "c") as cache:
        cache.view("e", "p").store("h", "image", picture())
        cache.flush()
        stored_state = cache.disk.get(next(cache.disk.metas()).id)
        lie = {**stored_state.meta.metadata, "shape": [400, 8]}
        cache.disk.put(StoredState(replace(stored_state.meta, metadata=lie), stored_state.tensor))
        cache.view("e", "p").remove("h")
        assert cache.view("e", "p").lookup("h") is None
        assert cache.stats().disk_corrupt == 1


class SlowObjects(MemoryObjects):
    """Objects on a disk that hangs until `release` is set."""

    def __init__(self):
        super().__init__()
        self.hangs, self.release = threading.Event(), threading.Event()

    def put(self, *arguments):
        self.hangs.set()
        self.release.wait()
        return super().put(*arguments)


def test_a_slow_disk_keeps_nobody_waiting_and_takes_bounded_memory():
    objects = SlowObjects()
    store = Store(objects, queue=2)
    cache = VisualKVCache(disk=store)
    cache.store("first", "image", picture())
    objects.hangs.wait()
    for name in "abcd":
        assert cache.get_or_compute(name, "image", picture) is not None
    assert store.stats().submissions.dropped == 2
    objects.release.set()
    cache.flush()
    assert store.stats().entries == 3
    cache.close()


def test_once_cleared_nothing_is_left_of_what_was_being_written():
    objects = SlowObjects()
    cache = VisualKVCache(disk=Store(objects))
    cache.store("h", "image", picture())
    objects.hangs.wait()
    clearing = threading.Thread(target=cache.clear)
    clearing.start()
    clearing.join(0.1)
    assert clearing.is_alive()
    objects.release.set()
    clearing.join(20)
    assert list(objects.list()) == []
    cache.close()


def test_an_output_can_be_loaded_before_it_is_written():
    objects = SlowObjects()
    cache = VisualKVCache(disk=Store(objects))
    view = cache.view("e", "p")
    view.store("h", "image", picture())
    view.remove("h")
    loaded = view.lookup("h").embedding
    loaded[:] = 7  # it is the reader's own
    view.remove("h")
    assert view.lookup("h").embedding[0, 0] == 1
    objects.release.set()
    cache.close()


def test_a_clip_of_100_frames_is_written_whole(tmp_path):
    names = [str(number) for number in range(100)]
    with opened(tmp_path / "c") as cache:
        for number, name in enumerate(names):
            cache.get_or_compute(name, "video", lambda number=number: picture(number))
    with opened(tmp_path / "c") as cache:
        assert [cache.get_or_compute(name, "video", pytest.fail)[0, 0] for name in names] == list(range(100))


def test_the_later_output_of_a_key_stays_and_a_closed_cache_drops(tmp_path):
    with opened(tmp_path / "c") as cache:
        for value in (1, 2):
            cache.store("h", "image", picture(value))
    cache.store("h", "image", picture(3))
    cache.close()
    with opened(tmp_path / "c") as cache:
        assert cache.lookup("h").embedding[0, 0] == 2


WRITER = """
import sys, time
import numpy as np
from dejakv.encoder_cache import VisualKVCache
with VisualKVCache(disk=sys.argv[1]) as cache:
    print("open", flush=True)
    sys.stdin.readline()
    cache.view("e", "p").get_or_compute("h", "image", lambda: np.full((4, 8), 3, np.float32))
"""


def test_a_reader_sees_what_another_process_encodes(tmp_path):
    """Open in both at once; the reader waits for an output that does not exist yet."""
    with opened(tmp_path / "c") as cache:
        view = cache.view("e", "p")
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "c")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert writer.stdout.readline().strip() == b"open"
        assert view.wait_for("h", timeout_s=0.02) is None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
        block = view.wait_for("h", timeout_s=20)
        assert block is not None
        assert block.embedding[0, 0] == 3
        assert (view.stats().hits, view.stats().misses) == (1, 1)
        writer.communicate()
        assert writer.returncode == 0


def test_wait_for_without_a_disk_sees_other_threads():
    view = VisualKVCache().view("e", "p")
    threading.Timer(0.02, lambda: view.store("h", "image", picture())).start()
    assert view.wait_for("h", timeout_s=5) is not None

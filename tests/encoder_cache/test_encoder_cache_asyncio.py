"""asyncio tasks on `aget_or_compute`, alone and mixed with threads."""

import asyncio
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

from dejakv.encoder_cache import DiskTier, VisualKVCache
from dejakv.errors import InputError


def picture(value=1):
    return np.full((2, 4), value, np.float32)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async encoder", "encoder in a thread"])
def test_one_run_per_distinct_picture_under_many_tasks(asynchronous):
    cache = VisualKVCache(max_entries=64)
    view = cache.view("e", "p")
    runs = Counter()

    async def encode(name):
        runs[name] += 1
        await asyncio.sleep(0.001)
        return picture(name)

    def encode_in_thread(name):
        runs[name] += 1
        time.sleep(0.001)
        return picture(name)

    async def caller(seed):
        for name in random.Random(seed).choices(range(30), k=30):
            if asynchronous:

                async def compute(name=name):
                    return await encode(name)

            else:

                def compute(name=name):
                    return encode_in_thread(name)

            assert (await view.aget_or_compute(str(name), "image", compute))[0, 0] == name

    async def main():
        await asyncio.wait_for(asyncio.gather(*[caller(seed) for seed in range(50)]), 30)

    asyncio.run(main())
    assert set(runs.values()) == {1}
    stats = cache.stats()
    assert stats.encoder_runs == len(runs)
    assert stats.hits + stats.misses == 1500
    assert stats.waiting_callers == 0


def test_threads_and_tasks_of_two_loops_share_one_run():
    view = VisualKVCache().view("e", "p")
    runs, got = [], []

    def compute():
        runs.append(1)
        time.sleep(0.05)
        return picture()

    async def main():
        got.extend(await asyncio.gather(*[view.aget_or_compute("h", "image", compute) for _ in range(10)]))

    threads = [threading.Thread(target=lambda: asyncio.run(main()), daemon=True) for _ in range(2)]
    threads += [
        threading.Thread(target=lambda: got.append(view.get_or_compute("h", "image", compute)), daemon=True)
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1
    assert len(got) == 25
    assert all(item is got[0] for item in got)


def test_an_encoder_error_goes_to_every_task():
    view = VisualKVCache().view("e", "p")
    runs = []

    async def main():
        async def compute():
            runs.append(1)
            await asyncio.sleep(0.01)
            raise RuntimeError("encoder down")

        calls = [view.aget_or_compute("h", "image", compute) for _ in range(5)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["encoder down"] * 5

    asyncio.run(main())
    assert len(runs) == 1
    assert view.lookup("h") is None


def test_the_sync_face_refuses_to_block_the_loop_that_encodes():
    view = VisualKVCache().view("e", "p")

    async def main():
        async def compute():
            await asyncio.sleep(0.05)
            return picture()

        task = asyncio.create_task(view.aget_or_compute("h", "image", compute))
        await asyncio.sleep(0.01)
        with pytest.raises(InputError, match="aget_or_compute"):
            view.get_or_compute("h", "image", picture)
        assert (await task)[0, 0] == 1

    asyncio.run(main())


def test_an_async_encoder_given_to_the_sync_face_is_an_error():
    view = VisualKVCache().view("e", "p")

    async def compute():
        return picture()

    with pytest.raises(InputError, match="asynchronous"):
        view.get_or_compute("h", "image", compute)


def test_an_object_with_an_async_call_is_awaited():
    class Encoder:
        async def __call__(self):
            return picture(3)

    view = VisualKVCache().view("e", "p")
    assert asyncio.run(view.aget_or_compute("h", "image", Encoder()))[0, 0] == 3


def test_with_a_disk_tier(tmp_path):
    runs = []

    async def compute():
        runs.append(1)
        return picture()

    for _ in range(2):
        with VisualKVCache(disk=DiskTier.open(tmp_path / "tier")) as cache:
            got = asyncio.run(cache.view("e", "p").aget_or_compute("h", "image", compute))
            assert got[0, 0] == 1
    assert len(runs) == 1
    assert cache.stats("p").disk_hits == 1

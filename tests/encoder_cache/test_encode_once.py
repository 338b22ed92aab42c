"""One encoder run for each distinct picture, whoever asks: threads, asyncio tasks, and callers that are cancelled or interrupted."""

import asyncio
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

from dejakv.encoder_cache import VisualKVCache
from dejakv.errors import InputError


def run_all(targets):
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(thread.is_alive() for thread in threads), "a caller was never woken"


def test_one_run_per_distinct_picture_under_many_threads():
    cache = VisualKVCache(max_entries=64)
    view = cache.view("e", "p")
    runs, lock, wrong = Counter(), threading.Lock(), []

    def compute(name):
        with lock:
            runs[name] += 1
        time.sleep(0.0005)
        return np.full((2, 4), name, np.float32)

    def worker(seed):
        for name in random.Random(seed).choices(range(50), k=200):
            got = view.get_or_compute(str(name), "image", lambda name=name: compute(name))
            if got[0, 0] != name:
                wrong.append(name)

    run_all([lambda seed=seed: worker(seed) for seed in range(16)])
    assert not wrong
    assert set(runs.values()) == {1}
    stats = cache.stats()
    assert stats.encoder_runs == len(runs) == stats.misses
    assert stats.hits + stats.misses == 16 * 200
    assert stats.waiting_callers == 0


def ask(view, compute):
    return view.get_or_compute("h", "image", compute)


def ask_as_a_task(view, compute):
    async def encode():
        return await asyncio.to_thread(compute)

    return asyncio.run(view.aget_or_compute("h", "image", encode))


@pytest.mark.parametrize("asked", [ask, ask_as_a_task])
def test_an_encoder_error_goes_to_everyone_who_waited_and_is_not_kept(asked):
    view = VisualKVCache().view("e", "p")
    release, runs, errors = threading.Event(), [], []

    def broken():
        runs.append(1)
        release.wait()
        raise MemoryError("no VRAM left")

    def caller():
        with pytest.raises(MemoryError, match="no VRAM") as caught:
            asked(view, broken)
        errors.append(caught.value)

    def open_when_all_wait():
        while view.stats().waiting_callers < 4:
            time.sleep(0.001)
        release.set()

    run_all([caller] * 5 + [open_when_all_wait])
    assert len(runs) == 1
    assert len(errors) == 5
    stats = view.stats()
    assert (stats.encoder_failures, stats.encoder_runs, stats.entries) == (1, 0, 0)
    assert stats.hits == 0
    assert view.get_or_compute("h", "image", lambda: np.ones((1, 1))) is not None


def test_an_interrupted_leader_is_replaced_by_one_who_waits():
    view = VisualKVCache().view("e", "p")
    release, runs, got = threading.Event(), [], []

    def compute():
        runs.append(1)
        if len(runs) == 1:
            release.wait()
            raise KeyboardInterrupt
        return np.ones((1, 1))

    def leader():
        with pytest.raises(KeyboardInterrupt):
            view.get_or_compute("h", "image", compute)

    def follower():
        while not runs:
            time.sleep(0.001)
        got.append(view.get_or_compute("h", "image", compute))

    def interrupt():
        while view.stats().waiting_callers < 3:
            time.sleep(0.001)
        release.set()

    run_all([leader, follower, follower, follower, interrupt])
    assert len(runs) == 2
    assert len(got) == 3
    assert view.stats().waiting_callers == 0


def test_an_encoder_that_asks_for_its_own_output_is_told_so():
    view = VisualKVCache().view("e", "p")

    def compute():
        return view.get_or_compute("h", "image", compute)

    with pytest.raises(InputError, match="wait for itself"):
        view.get_or_compute("h", "image", compute)
    assert view.get_or_compute("h", "image", lambda: np.ones((1, 1))) is not None


def test_an_encoder_may_ask_for_another_output():
    view = VisualKVCache().view("e", "p")
    outer = view.get_or_compute(
        "clip", "video", lambda: view.get_or_compute("frame", "image", lambda: np.ones((1, 1))) * 2
    )
    assert outer[0, 0] == 2


def test_two_callers_with_keys_in_common_do_not_wait_for_each_other_forever():
    view = VisualKVCache(max_entries=1000).view("e", "p")
    encoded, lock = Counter(), threading.Lock()

    def worker(seed):
        chance = random.Random(seed)
        for _ in range(30):
            names = [str(name) for name in chance.sample(range(60), 12)]

            def compute(indices, names=names):
                with lock:
                    encoded.update(names[index] for index in indices)
                time.sleep(0.0005)
                return [np.full((1, 1), int(names[index])) for index in indices]

            got = view.get_or_compute_many(names, "video", compute)
            assert [str(item[0, 0]) for item in got] == names

    run_all([lambda seed=seed: worker(seed) for seed in range(8)])
    assert set(encoded.values()) == {1}


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
    assert (view.stats().coalesced, view.stats().waiting_callers) == (24, 0)


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


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async encoder", "encoder in a thread"])
@pytest.mark.parametrize("gone", [1, 5], ids=["others wait", "nobody waits"])
def test_a_cancelled_caller_does_not_cancel_the_run_it_started(asynchronous, gone):
    view = VisualKVCache().view("e", "p")
    runs = []

    async def main():
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def encode():
            runs.append(1)
            await release.wait()
            return picture()

        def encode_in_thread():
            runs.append(1)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return picture()

        compute = encode if asynchronous else encode_in_thread
        leader = asyncio.create_task(view.aget_or_compute("h", "image", compute))
        while not runs:
            await asyncio.sleep(0.001)
        followers = [asyncio.create_task(view.aget_or_compute("h", "image", compute)) for _ in range(5)]
        await asyncio.sleep(0.01)
        assert view.stats().waiting_callers == 5
        for cancelled in (leader, *followers[:gone]):
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        assert view.stats().waiting_callers == 5 - gone
        release.set()
        got = await asyncio.wait_for(asyncio.gather(*followers[gone:]), 10)
        assert all(item is got[0] for item in got)
        while not view.stats().entries:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert len(runs) == 1
    assert view.lookup("h") is not None
    assert view.stats().waiting_callers == 0


def test_a_run_that_dies_with_its_loop_is_taken_over():
    """The loop ends in the middle of the encoder's run; a thread that waits for it computes itself."""
    view = VisualKVCache().view("e", "p")
    got, started = [], threading.Event()

    def follow():
        started.wait()
        got.append(view.get_or_compute("h", "image", lambda: picture(2)))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()

    async def main():
        async def compute():
            started.set()
            await asyncio.sleep(60)

        task = asyncio.create_task(view.aget_or_compute("h", "image", compute))
        while view.stats().waiting_callers < 1:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(main())
    thread.join()
    assert got
    assert got[0][0, 0] == 2


def test_a_run_stranded_by_a_closed_loop_is_taken_over():
    """The same where the loop is closed without ending its tasks, so that nobody is told."""
    view = VisualKVCache().view("e", "p")
    begun, got = [], []

    async def compute():
        begun.append(1)
        await asyncio.sleep(60)

    async def until_it_runs():
        while not begun:
            await asyncio.sleep(0.001)

    loop = asyncio.new_event_loop()
    caller = loop.create_task(view.aget_or_compute("h", "image", compute))
    loop.run_until_complete(until_it_runs())
    thread = threading.Thread(target=lambda: got.append(view.get_or_compute("h", "image", lambda: picture(2))))
    thread.start()
    while not view.stats().waiting_callers:
        time.sleep(0.001)
    left = {caller} | asyncio.all_tasks(loop)
    loop.close()
    thread.join()
    assert got[0][0, 0] == 2
    for task in left:
        task._log_destroy_pending = False
        task.get_coro().close()


def test_an_encoder_that_is_cancelled_is_started_again_for_all():
    view = VisualKVCache().view("e", "p")
    runs = []

    async def main():
        async def compute():
            runs.append(asyncio.current_task())
            await asyncio.sleep(0.05)
            return picture()

        callers = [asyncio.create_task(view.aget_or_compute("h", "image", compute)) for _ in range(3)]
        while not runs:
            await asyncio.sleep(0.001)
        runs[0].cancel()
        got = await asyncio.wait_for(asyncio.gather(*callers), 10)
        assert all(item is got[0] for item in got)

    asyncio.run(main())
    assert len(runs) == 2


def test_an_encoder_may_raise_a_timeout_of_its_own():
    async def compute():
        raise TimeoutError("the tower is slow")

    with pytest.raises(TimeoutError, match="tower"):
        asyncio.run(VisualKVCache().view("e", "p").aget_or_compute("h", "image", compute))

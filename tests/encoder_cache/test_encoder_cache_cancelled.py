"""Tasks that are cancelled, and runs that die with their loop: nobody else loses an output."""

import asyncio
import threading
import time

import pytest
from tests.encoder_cache.test_encoder_cache_asyncio import picture

from dejakv.encoder_cache import VisualKVCache


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async encoder", "encoder in a thread"])
def test_a_cancelled_caller_does_not_cancel_the_run_it_started(asynchronous):
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
        leader.cancel()
        followers[0].cancel()
        for cancelled in (leader, followers[0]):
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        assert view.stats().waiting_callers == 4
        release.set()
        got = await asyncio.wait_for(asyncio.gather(*followers[1:]), 10)
        assert all(item is got[0] for item in got)

    asyncio.run(main())
    assert len(runs) == 1
    assert view.lookup("h") is not None
    assert view.stats().waiting_callers == 0


def test_everyone_cancelled_and_the_output_is_kept_all_the_same():
    view = VisualKVCache().view("e", "p")

    async def main():
        async def compute():
            await asyncio.sleep(0.02)
            return picture()

        task = asyncio.create_task(view.aget_or_compute("h", "image", compute))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert view.lookup("h") is not None


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

    async def compute():
        await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    task = loop.create_task(view.aget_or_compute("h", "image", compute))
    loop.run_until_complete(asyncio.sleep(0.01))
    flight = view._registry._flights["p", "e", "image", "h"]
    inner = flight._task
    got = []
    thread = threading.Thread(
        target=lambda: got.append(view.get_or_compute("h", "image", lambda: picture(2))), daemon=True
    )
    thread.start()
    while not view.stats().waiting_callers:
        time.sleep(0.001)
    loop.close()
    thread.join()
    assert got[0][0, 0] == 2
    for left in (task, inner):
        left._log_destroy_pending = False
        left.get_coro().close()


def test_a_task_cancelled_before_it_began_wakes_those_who_wait():
    view = VisualKVCache().view("e", "p")
    runs = []

    async def main():
        async def compute():
            runs.append(1)
            return picture()

        leader = asyncio.create_task(view.aget_or_compute("h", "image", compute))
        follower = asyncio.create_task(view.aget_or_compute("h", "image", compute))
        while not view._registry._flights:
            await asyncio.sleep(0)
        flight = next(iter(view._registry._flights.values()))
        flight._task.cancel()
        got = await asyncio.wait_for(asyncio.gather(leader, follower), 10)
        assert got[0] is got[1]

    asyncio.run(main())
    assert len(runs) == 1

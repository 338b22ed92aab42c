"""The thread in which prompts are compared as text: how many wait, and whether it is free."""

import threading
from concurrent.futures import wait

from dejakv.engines.vllm.texts import TEXTS_WAITING, Texts


def test_at_most_so_many_wait_and_one_that_is_given_up_makes_room() -> None:
    texts, go = Texts(), threading.Event()

    def waits() -> None:
        assert go.wait()

    assert texts.idle
    jobs = [texts.submit(waits) for _ in range(TEXTS_WAITING)]
    assert not texts.idle
    assert texts.submit(waits) is None
    last = jobs[-1]
    assert last is not None
    assert last.cancel()
    assert texts.submit(waits) is not None
    go.set()
    assert not wait([job for job in jobs if job is not None], 5).not_done
    texts.close()
    assert texts.idle

"""Memory that is lent: never to two at once, found again by others, bounded when idle."""

import threading

import pytest
import torch

from dejakv.engines.vllm.buffers import Buffers


def test_what_is_given_back_is_lent_again():
    buffers = Buffers(1 << 20)
    first = buffers.lend((3, 5, 7), torch.float32)
    assert first.tensor.shape == (3, 5, 7)
    assert first.tensor.is_contiguous()
    first.tensor.fill_(1.0)
    other = buffers.lend((3, 5, 7), torch.float32)
    assert other.tensor.data_ptr() != first.tensor.data_ptr()  # the first is still out
    buffers.take_back(first)
    again = buffers.lend((10, 4), torch.bfloat16)
    assert again.tensor.data_ptr() == first.tensor.data_ptr()


def test_a_larger_need_gets_memory_of_its_own():
    buffers = Buffers(1 << 30)
    small = buffers.lend((100,), torch.uint8)
    buffers.take_back(small)
    large = buffers.lend((1 << 20,), torch.uint8)
    assert large.tensor.data_ptr() != small.tensor.data_ptr()
    buffers.take_back(large)
    assert buffers.lend((100,), torch.uint8).tensor.data_ptr() == small.tensor.data_ptr()  # the smallest that fits


def test_idle_memory_is_bounded():
    buffers = Buffers(keep_bytes=3 << 20)
    lent = [buffers.lend((1 << 20,), torch.uint8) for _ in range(8)]
    for item in lent:
        buffers.take_back(item)
    assert sum(memory.numel() for memory in buffers._free) <= 3 << 20


@pytest.mark.parametrize("inference", [False, True])
def test_memory_lent_in_inference_mode_can_be_written_outside(inference):
    buffers = Buffers(1 << 20)
    with torch.inference_mode(inference):
        lent = buffers.lend((4,), torch.float32)
    lent.tensor.copy_(torch.ones(4))
    assert lent.tensor.tolist() == [1.0] * 4


def test_threads_never_share_memory():
    buffers = Buffers(1 << 24)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            lent = buffers.lend((257,), torch.int64)
            lent.tensor.fill_(mark)
            if not bool((lent.tensor == mark).all()):
                wrong.append(mark)
            buffers.take_back(lent)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

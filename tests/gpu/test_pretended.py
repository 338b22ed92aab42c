"""The pretended GPU finds the faults that it is for, and only those."""

import threading
from collections.abc import Callable, Generator

import pytest
import torch
from tests.gpu.pretended import Gpu, MixedDevicesError, pretended

SEEDS = range(200)
N = 64


@pytest.fixture
def gpu() -> Generator[Gpu]:
    with pretended() as made:
        yield made


def in_thread(gpu: Gpu, work: Callable[[], None]) -> None:
    def run() -> None:
        with gpu:
            work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def upload(
    gpu: Gpu, *, waits: bool = True, record_late: bool = True, on_side: bool = True, side_waits: bool = True
) -> list[float]:
    """A copy from pinned memory on a stream of its own, used behind an event by the engine loop."""
    host = torch.empty(N, pin_memory=True)
    host.copy_(torch.arange(float(N)))
    device, side, event = torch.zeros(N, device=gpu.device), torch.cuda.Stream(gpu.device), torch.cuda.Event()
    if side_waits:
        side.wait_stream(torch.cuda.current_stream(gpu.device))
    with torch.cuda.stream(side):
        if not record_late:
            event.record(side)
        device.copy_(host, non_blocking=True)
        if record_late:
            event.record(side if on_side else None)
    if not on_side:
        event.record(torch.cuda.current_stream(gpu.device))
    if waits:
        torch.cuda.current_stream(gpu.device).wait_event(event)
    return (device + 0.0).cpu().tolist()


def test_copies_that_are_waited_for_are_right_however_late_they_are() -> None:
    for seed in SEEDS:
        with pretended(seed % 2, seed) as gpu:
            assert upload(gpu) == list(range(N))
            counts = gpu.take()
            assert (counts.figures["races"], counts.figures["loop_waits"]) == (0, 1)  # the last line's


@pytest.mark.parametrize("fault", ["waits", "record_late", "on_side", "side_waits"])
def test_a_missing_event_and_a_wrong_stream_are_found(fault: str) -> None:
    wrong = 0
    for seed in SEEDS:
        with pretended(0, seed) as gpu:
            wrong += upload(gpu, **{fault: False}) != list(range(N))
            assert gpu.take().races
    # The last one is a race with the zeros, whose kernel is never late here.
    assert wrong > len(SEEDS) // 2 or fault == "side_waits"


def test_an_event_of_a_thread_is_on_the_threads_device() -> None:
    """That is device 0 until it is set: such an event orders nothing on another device."""
    for sets in (False, True):
        with pretended(1) as gpu:
            made: list[tuple[torch.Tensor, torch.cuda.Event]] = []

            def work(gpu: Gpu = gpu, made: list = made, sets: bool = sets) -> None:
                if sets:
                    torch.cuda.set_device(gpu.device)
                made.append((torch.ones(N, device=gpu.device) * 2, torch.cuda.Event()))
                made[0][1].record()

            in_thread(gpu, work)
            torch.cuda.current_stream(gpu.device).wait_event(made[0][1])
            made[0][0].sum()
            assert bool(gpu.take().races) != sets


def test_pinned_memory_that_is_used_again_too_early_is_found() -> None:
    wrong = 0
    for seed in SEEDS:
        with pretended(0, seed) as gpu:
            host = torch.ones(N, pin_memory=True)
            host.copy_(torch.ones(N))
            device = torch.empty(N, device=gpu.device)
            device.copy_(host, non_blocking=True)
            host.zero_()
            wrong += float(device.sum()) != N
    assert wrong


def test_a_copy_to_the_host_is_read_too_early() -> None:
    with pretended() as gpu:
        host, event = torch.zeros(N, pin_memory=True), torch.cuda.Event()
        host.zero_()
        host.copy_(torch.ones(N, device=gpu.device), non_blocking=True)
        event.record()
        assert not host.any()
        event.synchronize()
        assert host.all()
        counts = gpu.take()
        assert counts.figures["loop_waits"] == 1
        assert dict(counts.copies) == {"d2h pinned async": (1, 4 * N)}


def test_a_copy_of_pageable_memory_waits_whatever_was_asked_for(gpu: Gpu) -> None:
    torch.empty(N, device=gpu.device).copy_(torch.ones(N), non_blocking=True)
    counts = gpu.take()
    assert counts.figures["loop_waits"] == 1
    assert counts.copied("h2d", "pageable") == 4 * N


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.cpu(), lambda x: torch.equal(x, x),
        lambda x: torch.cuda.current_stream(x.device).synchronize(), lambda x: x[torch.tensor([1, 2])], lambda x: x.tolist(),
    ],
)  # fmt: skip
def test_waits_are_those_of_the_thread_that_waits(gpu: Gpu, wait: Callable[[torch.Tensor], object]) -> None:
    numbers = torch.ones(N, device=gpu.device)
    wait(numbers)
    assert gpu.take().figures["loop_waits"] == 1
    in_thread(gpu, lambda: wait(numbers) and None)
    figures = gpu.take().figures
    assert (figures["loop_waits"], figures["thread_waits"]) == (0, 1)


def test_a_host_tensor_among_device_tensors_is_refused(gpu: Gpu) -> None:
    numbers = torch.ones(N, device=gpu.device)
    for fault in (
        lambda: numbers + torch.ones(N),
        lambda: torch.ones(N)[numbers.long()],
        lambda: torch.cat([numbers, torch.ones(N)]),
    ):
        with pytest.raises(MixedDevicesError):
            fault()
    assert float((numbers + torch.tensor(1.0)).sum()) == 2 * N  # a number of no dimension is an argument


def test_views_and_empty_memory_launch_nothing(gpu: Gpu) -> None:
    numbers = torch.empty(8, 8, device=gpu.device)
    numbers.view(64)[3:9].unsqueeze(0).expand(3, -1)
    numbers.T.split(2)
    assert gpu.take().figures["launches"] == 0
    numbers.T.contiguous()
    numbers.mul_(2).add_(1)
    assert gpu.take().figures["launches"] == 3

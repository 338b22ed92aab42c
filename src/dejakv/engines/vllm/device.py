"""Copies to the device that holds a worker's KV cache and from it, and their order.

Streams, events and pinned memory are used here alone. A GPU's threads each have a current device,
which is the first one until it is set, and kernels of one stream are ordered behind those of
another by an event. State leaves and enters on streams of its own, through memory that is reserved
at the start: pinned memory of the host, and a stage on the device.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("dejakv.vllm")

STAGE_BYTES = 128 << 20
"""Bytes of the device's memory that a worker reserves for each direction."""
UPLOAD_BYTES = 64 << 20
"""Bytes of raw pages of a blend's donors from which on they go up together."""
POLL_S = 0.002
"""Seconds between two looks at whether there is room in a pool."""
PIN_WAIT_S = 0.05
"""Longest wait of a load for pinned memory, in seconds: then it goes without."""
COPY_THREADS = 4
"""Threads that copy state into pinned memory: one is slower than the way to the GPU behind it."""


class LentRange:
    """Lent host memory, which goes back when nothing refers to this object any more.

    Attributes
    ----------
    tensor : Tensor, uint8
        The memory, of undefined content.
    """

    def __init__(self, tensor: torch.Tensor, go_back: Callable[[], object] = lambda: None) -> None:
        self.tensor = tensor
        self._go_back = go_back

    def __del__(self) -> None:
        self._go_back()


class RangePool:
    """Lends ranges of one piece of memory, the first that is long enough. Thread-safe."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._free = [(0, memory.numel())]
        # A range may go back at any moment of any thread, so that takes no lock.
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def lend(self, shape: tuple[int, ...], wait_s: float = 0.0) -> LentRange | None:
        """Lend bytes; None if there is no room, or still none after `wait_s` seconds."""
        nbytes = math.prod(shape)
        # Ranges begin at whole words, which copies are faster by.
        size, until = -(-nbytes // 64) * 64, time.monotonic() + wait_s
        start = self._take(size)
        while start is None:
            if size > self._memory.numel() or time.monotonic() >= until:
                return None
            time.sleep(POLL_S)
            start = self._take(size)

        lent = self._memory[start : start + nbytes].view(shape)
        return LentRange(lent, partial(self._returned.append, (start, start + size)))

    def _take(self, size: int) -> int | None:
        """Take a range out of the free ones, and return where it begins; None without room."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            merged: list[tuple[int, int]] = []
            for start, stop in sorted(self._free):
                if merged and merged[-1][1] == start:
                    start, _ = merged.pop()
                merged.append((start, stop))
            self._free = merged

            for number, (start, stop) in enumerate(merged):
                if stop - start >= size:
                    merged[number] = start + size, stop
                    return start
        return None


class DeviceCopies:
    """Copies of a device without streams, as the CPU is: a copy has happened when a call returns.

    Parameters
    ----------
    device : torch.device
        The device of the KV cache.
    """

    is_host = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def of(device: torch.device) -> "DeviceCopies":
        """Return the implementation for a device."""
        return CudaCopies(device) if device.type == "cuda" else DeviceCopies(device)

    def reserve(self, pinned_bytes: int) -> None:
        """Reserve the memory that state is copied through. Call it once, at the start."""

    def close(self) -> None:
        """Wait for copies under way, whose memory is then free to go."""

    def enter_thread(self) -> None:
        """Make this the thread's current device. Call it first in each thread."""

    def upload(self, numbers: "torch.Tensor | NDArray[np.generic]") -> torch.Tensor:
        """Copy a small tensor from host memory, in order with the current stream."""
        host = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(numbers)
        return host.to(self.device)

    def event(self) -> torch.cuda.Event | None:
        """Record an event behind what this thread has ordered; None without streams."""
        return None

    def wait(self, event: torch.cuda.Event | None, tensor: torch.Tensor) -> None:
        """Order this thread's kernels behind an event of another thread.

        The memory of `tensor` is not given to others before these kernels ran.
        """


class CudaCopies(DeviceCopies):
    """Copies of a GPU, asynchronous, from and to pinned memory.

    Attributes
    ----------
    pinned : RangePool
        Pinned host memory. It has no room if it was not reserved, or was refused.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pinned = RangePool(torch.empty(0, dtype=torch.uint8))
        self._load_stage: torch.Tensor | None = None
        # A thread's copy to the stage and its use of it are not torn apart by another's.
        self._load_lock = threading.Lock()
        # Each half of the stage for saves with the event after which it is free again.
        self._halves: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def reserve(self, pinned_bytes: int) -> None:
        """Reserve pinned memory, a stage and a stream for each direction.

        What is refused costs time and nothing else: copies then take memory as they need it.
        """
        self._down, self._up = (torch.cuda.Stream(self.device) for _ in range(2))
        self._copying = ThreadPoolExecutor(COPY_THREADS, "dejakv-copy")
        try:
            # Outside of inference mode, since threads outside of that mode write to it too.
            with torch.inference_mode(False):
                pinned = torch.empty(pinned_bytes, dtype=torch.uint8, pin_memory=True)
                load_stage, *halves = (
                    torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                    for nbytes in (STAGE_BYTES, STAGE_BYTES // 2, STAGE_BYTES // 2)
                )
        except (RuntimeError, MemoryError) as error:
            log.warning("memory for copies of state was refused, so they are slower: %s", error)
            return
        self.pinned, self._load_stage = RangePool(pinned), load_stage
        self._halves.extend((half, None) for half in halves)

    def close(self) -> None:
        """Wait for copies under way, whose memory is then free to go."""
        self._copying.shutdown()
        for stream in (self._up, self._down):
            stream.synchronize()

    def enter_thread(self) -> None:
        """Make this the thread's current device. Call it first in each thread."""
        torch.cuda.set_device(self.device)

    def upload(self, numbers: Any) -> torch.Tensor:
        """Copy a small tensor from host memory, in order with the current stream."""
        host = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(numbers)
        if host.device.type != "cpu":
            return host
        # torch gives pinned memory to others when the copy has happened.
        pinned = _pinned(host.shape, host.dtype)
        return pinned.copy_(host).to(self.device, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        """Record an event behind what this thread has ordered."""
        return self._event_on(torch.cuda.current_stream(self.device))

    def wait(self, event: torch.cuda.Event | None, tensor: torch.Tensor) -> None:
        """Order this thread's kernels behind an event of another thread.

        The memory of `tensor` is not given to others before these kernels ran.
        """
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            tensor.record_stream(stream)

    def download(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start a copy of a small tensor to the host, in order with the current stream.

        Returns
        -------
        host : Tensor
            The copy. It may be read once `event` has passed.
        event : torch.cuda.Event
            Recorded behind the copy.
        """
        host = _pinned(numbers.shape, numbers.dtype)
        host.copy_(numbers, non_blocking=True)
        return host, self.event()

    def host_memory(self, shape: tuple[int, int]) -> LentRange:
        """Lend host memory for pages, pinned where that is possible."""
        return self.pinned.lend(shape) or LentRange(_pinned(shape, torch.uint8))

    def save(
        self, host: torch.Tensor, copy: Callable[[int, int, torch.Tensor], object]
    ) -> torch.cuda.Event:
        """Start to copy pages `[pages, bytes]` to the host, without a wait of the host.

        Pages are copied out of the cache on the current stream, so that whatever is ordered behind
        may overwrite it. They leave on a stream of their own. A save that is larger than the stage
        makes the current stream wait for the half that is used next.

        Parameters
        ----------
        host : Tensor, shape [pages, bytes], uint8
            Memory for the copy, pinned where that was possible.
        copy : Callable[[int, int, Tensor], object]
            Called with begin and end of a range of pages, and memory on the device for them.

        Returns
        -------
        torch.cuda.Event
            The copy may be read once it has passed.
        """
        count, page_bytes = host.shape
        step = 0 if not self._halves else self._halves[0][0].numel() // page_bytes
        event: torch.cuda.Event | None = None
        if not step:
            # No stage, or one that is smaller than a page.
            whole = torch.empty(host.shape, dtype=torch.uint8, device=self.device)
            copy(0, count, whole)
            whole.record_stream(self._down)
            return self._leave(whole, host)

        try:
            for begin in range(0, count, step):
                end = min(begin + step, count)
                half, free = self._halves[0]
                if free is not None:
                    torch.cuda.current_stream(self.device).wait_event(free)
                pages = half[: (end - begin) * page_bytes].view(end - begin, page_bytes)
                copy(begin, end, pages)
                event = self._leave(pages, host[begin:end])
                self._halves[0] = half, event
                self._halves.rotate(-1)
        except BaseException:
            # The caller gives the memory up, and earlier copies are still writing to it.
            self._down.synchronize()
            raise
        assert event is not None
        return event

    def can_load(self, page_bytes: int) -> bool:
        """Tell whether the stage has room for a page."""
        return self._load_stage is not None and page_bytes <= len(self._load_stage)

    def pin(self, parts: Sequence[torch.Tensor], wait_s: float = 0.0) -> LentRange | None:
        """Copy host memory into one range of pinned memory, part behind part.

        Several threads copy, and this one waits for them. Returns None if there is no room, or
        still none after `wait_s` seconds.
        """
        lent = self.pinned.lend((sum(part.nbytes for part in parts),), wait_s)
        if lent is None:
            return None
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        ranges = lent.tensor.split([part.nbytes for part in parts])
        for memory, part in zip(ranges, parts, strict=True):
            into, rows = memory.view(part.dtype).view(part.shape), -(-len(part) // COPY_THREADS)
            pieces += zip(into.split(rows), part.split(rows), strict=True)

        copied = [self._copying.submit(into.copy_, piece) for into, piece in pieces]
        # All of them, before an error of one gives the range back.
        wait(copied)
        for each in copied:
            each.result()
        return lent

    @contextmanager
    def load_stream(self) -> Generator[None]:
        """Make the stream of loads this thread's, behind what its own stream has ordered."""
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._up):
            yield

    def load(
        self, host: torch.Tensor, put: Callable[[torch.Tensor, int], object]
    ) -> torch.cuda.Event:
        """Start to copy pages `[pages, bytes]` from pinned memory to the device, and use them.

        All of it happens on the stream of loads, behind what the current stream has ordered. See
        `can_load`. Any thread may call it.

        Parameters
        ----------
        host : Tensor, shape [pages, bytes], uint8
            Pinned memory, which must stay as it is until the event has passed.
        put : Callable[[Tensor, int], object]
            Called with pages on the device, and the number of the first one.

        Returns
        -------
        torch.cuda.Event
            Passes when all pages were used.
        """
        assert self._load_stage is not None
        (count, page_bytes), stage = host.shape, self._load_stage
        step = len(stage) // page_bytes
        with self.load_stream():
            for begin in range(0, count, step):
                end = min(begin + step, count)
                # In order on one stream, so that the stage is free when the next pages come.
                pages = stage[: (end - begin) * page_bytes].view(-1, page_bytes)
                with self._load_lock:
                    pages.copy_(host[begin:end], non_blocking=True)
                    put(pages, begin)
        return self.load_event()

    def load_event(self) -> torch.cuda.Event:
        """Record an event behind all loads so far."""
        return self._event_on(self._up)

    def _leave(self, pages: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        """Start to copy pages on the device to the host, behind the current stream's work."""
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            host.copy_(pages, non_blocking=True)
        return self._event_on(self._down)

    def _event_on(self, stream: Any) -> torch.cuda.Event:
        # A thread that waits for it sleeps, and does not take a core.
        event = torch.cuda.Event(blocking=True)
        # Without a stream it would be recorded on the thread's current device.
        event.record(stream)
        return event


def _pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return pinned memory, or other memory where that is refused: copies then wait."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        log.debug("pinned memory was refused: %s", error)
        return torch.empty(shape, dtype=dtype)

"""A GPU pretended on the CPU: its tensors have real values in host memory and say that they are on `cuda:N`.

Every operation passes through `Gpu`, which counts launches, host waits and copies, each with the line of the package that asked for it. Streams are
tracked with vector clocks, so that memory that is used across streams without an event is a race. Asynchronous copies are late: they happen when
something waits for them, or at a random moment before (`seed`). Code that does not wait reads what was there before, as on a GPU.

What this cannot see: time, the inside of compiled kernels, kernels that are late, and memory that the allocator gives to another stream.
It needs torch's wheels for CPUs. The CPU's device guard stands in c10's registry for CUDA's, which such a build does not have.
"""

import contextlib
import ctypes
import random
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from concurrent.futures import thread as pools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default, aten._unique2.default,
    aten.bincount.default, aten.is_nonzero.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
"""Operations whose result the host needs, so that it waits for the device."""
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
VIEWS = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten._unsafe_view.default}
EMPTY = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip
POISON = 0xA5
"""Bytes of memory that a late copy has not reached."""
LATE = 0.05
"""Chance that an operation finds one more of the late copies done."""


class MixedDevicesError(RuntimeError):
    """A host tensor met a device tensor where CUDA raises."""


@dataclass
class Counts:
    """What was counted since the last `Gpu.take`, by place: "file:line function", innermost in the package.

    `waits` of the engine loop, which is the thread that pretends the GPU, stand apart from those of other threads. Launches of the model's own
    forward are `model_launches`. `copies` are counts and bytes by kind, such as "h2d pageable blocking". `empty` are bytes of the device that were asked
    for by `torch.empty`.
    """

    launches: Counter[str] = field(default_factory=Counter[str])
    model_launches: int = 0
    loop_waits: Counter[str] = field(default_factory=Counter[str])
    thread_waits: Counter[str] = field(default_factory=Counter[str])
    races: Counter[str] = field(default_factory=Counter[str])
    copies: dict[str, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    empty: int = 0

    @property
    def figures(self) -> dict[str, int]:
        sums = {name: sum(getattr(self, name).values()) for name in ("launches", "loop_waits", "thread_waits", "races")}
        return {**sums, "model_launches": self.model_launches}

    def add(self, other: "Counts") -> None:
        for name in ("launches", "loop_waits", "thread_waits", "races"):
            getattr(self, name).update(getattr(other, name))
        self.model_launches += other.model_launches
        for kind, (number, nbytes) in other.copies.items():
            self.copies[kind] = self.copies[kind][0] + number, self.copies[kind][1] + nbytes

    def copied(self, *words: str) -> int:
        """Bytes of copies whose kind has all these words."""
        return sum(nbytes for kind, (_, nbytes) in self.copies.items() if set(words) <= set(kind.split()))


class Memory:
    """A storage on the device: who wrote and who read it last, as (stream, time)."""

    def __init__(self) -> None:
        self.written: tuple[Stream, int] | None = None
        self.read: dict[Stream, int] = {}


class Stream:
    """In the place of `torch.cuda.Stream`. `seen` is how far it is behind other streams."""

    gpu: "Gpu"

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("cuda", self.gpu.current_device() if device is None else torch.device(device).index)
        self.time = self.finished = 0
        self.seen: dict[Stream, int] = {}
        self.gpu.streams.append(self)
        self.late: list[tuple[int, dict[Stream, int], Callable[[], object]]] = []

    def wait_event(self, event: "Event") -> None:
        for stream, time in event.marks.items():
            self.seen[stream] = max(self.seen.get(stream, 0), time)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(Event().record_on(other))

    def record_event(self, event: "Event | None" = None) -> "Event":
        return (event or Event()).record_on(self)

    def synchronize(self) -> None:
        self.gpu.host_waits()
        self.finish()

    def query(self) -> bool:
        return self.record_event().query()

    @property
    def marks(self) -> dict["Stream", int]:
        """Up to which time of each stream all has happened when what is on this one now has."""
        return {**self.seen, self: self.time}

    def finish(self) -> None:
        """All on this stream has happened, and the host knows it."""
        finish(self.marks)

    def deliver(self, time: int) -> None:
        """Late copies up to a time happen; the host knows nothing of it."""
        while self.late and self.late[0][0] <= time:
            _, behind, copy = self.late.pop(0)
            for stream, needed in behind.items():
                stream.deliver(needed)
            copy()


def finish(marks: dict[Stream, int]) -> None:
    for stream, time in marks.items():
        stream.deliver(time)
        stream.finished = max(stream.finished, time)


class Event:
    """In the place of `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.marks: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.record_on(stream or Stream.gpu.current_stream())

    def record_on(self, stream: Stream) -> "Event":
        self.marks = stream.marks
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.gpu.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        Stream.gpu.host_waits()
        finish(self.marks)

    def query(self) -> bool:
        if Stream.gpu.random.random() < 0.5:
            finish(self.marks)
        return all(stream.finished >= time for stream, time in self.marks.items())


class OnDevice(torch.Tensor):
    """A tensor on the pretended GPU; `elem` has its values."""

    gpu: "Gpu"
    elem: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, elem: torch.Tensor, device: torch.device, memory: Memory) -> "OnDevice":
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                elem.size(),
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
                dtype=elem.dtype,
                device=device,
            )
            made.elem, made.memory = elem, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.gpu.handle(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype}, {self.device})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def record_stream(self, stream: Stream) -> None:
        pass

    def is_inference(self) -> bool:
        return False

    def detach(self) -> "OnDevice":
        return self


_FUNCTIONS: dict[Any, tuple[str, str]] = {}
"""Of each code object seen: whose it is, "package" or "tests" or neither, and the parts of its place."""


def site() -> str:
    """The innermost line of the package, or of tests, that is under way."""
    frame, outside = sys._getframe(2), ""
    while frame is not None:
        code = frame.f_code
        if code not in _FUNCTIONS:
            path = code.co_filename
            owner = "package" if "/src/dejakv/" in path else "tests" if "/tests/" in path and path != __file__ else ""
            _FUNCTIONS[code] = owner, Path(path).name
        owner, file = _FUNCTIONS[code]
        if owner == "package":
            return f"{file}:{frame.f_lineno} {code.co_name}"
        if owner and not outside:
            outside = f"{file}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return outside


class Gpu(TorchDispatchMode):
    """The pretended device `cuda:index`. Its engine loop has a stream of its own, as vLLM's does; other threads share the default stream."""

    def __init__(self, index: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.device = torch.device("cuda", index)
        self.counts, self.random = Counts(), random.Random(seed)
        self._memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._pinned: dict[int, torch.Tensor] = {}  # never freed, so that no other tensor gets the address
        self._lock = threading.RLock()
        self._loop, self._local = threading.current_thread(), threading.local()
        self.streams: list[Stream] = []
        Stream.gpu = OnDevice.gpu = self
        self._defaults = {number: Stream(torch.device("cuda", number)) for number in range(index + 1)}
        self._local.device, self._local.streams = index, {index: Stream(self.device)}

    def take(self) -> Counts:
        counts, self.counts = self.counts, Counts()
        return counts

    # What torch.cuda has

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, device: Any) -> None:
        self._local.device = device if isinstance(device, int) else torch.device(device).index

    def current_stream(self, device: Any = None) -> Stream:
        index = self.current_device() if device is None else torch.device(device).index
        return self._of_thread().get(index, self._defaults[index])

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Generator[None]:
        if stream is None:
            yield
            return
        streams, before = self._of_thread(), self.current_stream(stream.device)
        streams[stream.device.index] = stream
        try:
            yield
        finally:
            streams[stream.device.index] = before

    def _of_thread(self) -> dict[int, Stream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        return self._local.streams

    # Counting

    def host_waits(self, where: str | None = None) -> None:
        counts = self.counts
        (counts.loop_waits if threading.current_thread() is self._loop else counts.thread_waits)[where or site()] += 1

    def launches(self, where: str) -> None:
        if where.endswith((" forward_rows", " attending", " updating")):
            self.counts.model_launches += 1
        else:
            self.counts.launches[where] += 1

    def used(self, stream: Stream, *tensors: Any, writes: bool = False) -> None:
        """Note that a stream reads or writes tensors, and whether another stream's use of them may not be over."""
        for memory in {each.memory for each in tensors if isinstance(each, OnDevice)}:
            before = [memory.written] if memory.written else []
            for other, time in before + (list(memory.read.items()) if writes else []):
                if other is not stream and time > max(other.finished, stream.seen.get(other, 0)):
                    self.counts.races[site()] += 1
            if writes:
                memory.written, memory.read = (stream, stream.time), {}
            else:
                memory.read[stream] = stream.time

    def launch(self, name: str, run: Callable[..., Any], *tensors: Any, writes: tuple[Any, ...] = ()) -> Any:
        """A compiled kernel that takes device tensors and writes to `writes`."""
        with self._lock:
            if any(isinstance(each, torch.Tensor) and not isinstance(each, OnDevice) for each in tensors):
                raise MixedDevicesError(f"{name}: a host tensor at {site()}")
            self._begin(*tensors)
            self.used(self.current_stream(self.device), *writes, writes=True)
            self.launches(f"{name} {site()}")
            with torch._C._DisableTorchDispatch():
                return run(*(each.elem if isinstance(each, OnDevice) else each for each in tensors))

    def _begin(self, *tensors: Any) -> Stream:
        """The current stream, moved on by an operation that reads these."""
        stream = self.current_stream(self.device)
        if self.random.random() < LATE:
            late = [each for each in self.streams if each.late]
            if late:
                each = self.random.choice(late)
                each.deliver(each.late[0][0])
        for other, time in stream.marks.items():
            other.deliver(time)
        stream.time += 1
        self.used(stream, *tensors)
        return stream

    def wrap(self, elem: Any, known: tuple[OnDevice, ...] = ()) -> Any:
        if not isinstance(elem, torch.Tensor):
            return elem
        for each in known:
            if each.elem is elem:
                return each
        pointer = elem.untyped_storage().data_ptr()
        memory = next((each.memory for each in known if each.elem.untyped_storage().data_ptr() == pointer), None)
        memory = memory or self._memories.get(pointer) or Memory()
        self._memories[pointer] = memory
        return OnDevice(elem, self.device, memory)

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handle(func, args, kwargs or {})

    def handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if (
            torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
            and func not in VIEWS
        ):
            with self._within():
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        with self._lock:
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        tensors = tuple(each for each in flat if isinstance(each, OnDevice))
        device = kwargs.get("device")
        here = torch.device(device).type == "cuda" if device is not None else bool(tensors)

        plain_args, plain = tree_map(_plain, args), tree_map(_plain, {**kwargs})
        pinned = plain.pop("pin_memory", None)
        if func is aten._to_copy.default or func is aten.copy_.default:
            return self._copy(
                func,
                args,
                kwargs,
                plain_args,
                plain,
                to_device=here if func is aten._to_copy.default else isinstance(args[0], OnDevice),
            )

        if not tensors and not here:
            with torch._C._DisableTorchDispatch():
                made = func(*plain_args, **plain)
            if pinned:
                self._pinned[made.untyped_storage().data_ptr()] = made
            return made

        where, view = site(), getattr(func, "is_view", False) or func in VIEWS
        if tensors:
            self._check_devices(func, args, flat, where)
        stream = self.current_stream(self.device)
        if not view and func not in EMPTY:
            stream = self._begin(*tensors)
            self.launches(where)
        if func in WAITS:
            self.host_waits(where)
            stream.finish()

        with torch._C._DisableTorchDispatch():
            made = func(*plain_args, **plain)
        out = tree_map(lambda value: self.wrap(value, tensors), made)
        if func in EMPTY:
            self.counts.empty += out.nbytes
        elif not view:
            self.used(stream, *tree_leaves(out), writes=True)
        return out

    def _check_devices(self, func: Any, args: Any, flat: list[torch.Tensor], where: str) -> None:
        strangers = [each for each in flat if not isinstance(each, OnDevice) and each.dim()]
        if func in INDEXING:
            if not isinstance(args[0], OnDevice):
                raise MixedDevicesError(f"{func}: a host tensor is indexed with device tensors at {where}")
            indexes = [each for each in args[1] if each is not None]
            value = args[2] if len(args) > 2 else None
            fills = value is not None and value.dim() == 0 and len(indexes) == 1
            for each in indexes:
                # A mask is counted first, and an index in host memory is copied.
                if (each.dtype in (torch.bool, torch.uint8) and not fills) or (
                    each.dim() and not isinstance(each, OnDevice)
                ):
                    self.host_waits(where)
            strangers = [each for each in strangers if not any(each is index for index in indexes)]
        if strangers:
            raise MixedDevicesError(f"{func}: host and device tensors at {where}")

    def _copy(
        self, func: Any, args: Any, kwargs: dict[str, Any], plain_args: Any, plain: dict[str, Any], *, to_device: bool
    ) -> Any:
        into = args[0] if func is aten.copy_.default else None
        source = args[1] if into is not None else args[0]
        from_device = isinstance(source, OnDevice)
        if not to_device and not from_device:
            with torch._C._DisableTorchDispatch():
                return func(*plain_args, **plain)

        where, stream = site(), self._begin(source)
        if to_device and from_device:
            self.launches(where)
            with torch._C._DisableTorchDispatch():
                made = func(*plain_args, **plain)
            out = into if into is not None else self.wrap(made)
            self.used(stream, out, writes=True)
            return out

        asked = args[2] if into is not None and len(args) > 2 else kwargs.get("non_blocking", False)
        with torch._C._DisableTorchDispatch():
            if into is None:
                made = torch.empty_like(
                    _plain(source), dtype=kwargs.get("dtype") or source.dtype, memory_format=torch.contiguous_format
                )
                if made.numel():
                    made.untyped_storage().fill_(POISON)
            else:
                made = _plain(into)
        host = source if to_device else made
        is_pinned = host.untyped_storage().data_ptr() in self._pinned
        # From memory that is not pinned, a copy is staged by the host, whatever was asked for.
        late = asked and is_pinned
        kind = f"{'h2d' if to_device else 'd2h'} {'pinned' if is_pinned else 'pageable'} {'async' if asked else 'blocking'}"
        number, nbytes = self.counts.copies[kind]
        self.counts.copies[kind] = number + 1, nbytes + source.nbytes

        out = into if into is not None else (self.wrap(made) if to_device else made)
        self.used(stream, out, writes=True)
        read = _plain(source)
        with torch._C._DisableTorchDispatch():
            copy = lambda: _copy_in(made, read)  # noqa: E731
        if late:
            stream.late.append((stream.time, dict(stream.seen), copy))
        else:
            copy()
            # Filling a scalar is an argument of a kernel; every other such copy is waited for.
            if source.dim() or not to_device:
                self.host_waits(where)
            stream.finish()
        return out

    @contextlib.contextmanager
    def _within(self) -> Generator[None]:
        depth = torch._C._len_torch_dispatch_stack()
        if depth and torch._C._get_dispatch_stack_at(depth - 1) is self:
            yield
        else:
            with self:
                yield


def _plain(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.elem
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _copy_in(into: torch.Tensor, source: torch.Tensor) -> None:
    with torch._C._DisableTorchDispatch(), torch.inference_mode():
        into.copy_(source)


@contextlib.contextmanager
def pretended(index: int = 0, seed: int = 0) -> Generator[Gpu]:
    """Run code on a pretended GPU, threads of pools too."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 25).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[1] or guards[0]

    gpu, run_item = Gpu(index, seed), pools._WorkItem.run

    def run_pretended(item: Any, *given: Any) -> None:
        with gpu:
            run_item(item, *given)

    instead = {
        "Event": Event, "Stream": Stream, "current_stream": gpu.current_stream, "stream": gpu.stream, "set_device": gpu.set_device,
        "current_device": gpu.current_device, "_lazy_init": lambda: None,
    }  # fmt: skip
    before = {name: getattr(torch.cuda, name) for name in instead}
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    pools._WorkItem.run = run_pretended
    try:
        for name, value in instead.items():
            setattr(torch.cuda, name, value)
        with gpu:
            yield gpu
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)
        torch._C._set_only_lift_cpu_tensors(lifts)
        pools._WorkItem.run = run_item

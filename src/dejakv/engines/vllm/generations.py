"""Which epoch state is stored and found under, now that weights may change while a server runs.

Every reset of the connector begins a generation. State of a new generation is under an epoch that nobody can guess and no
other process has, until all workers said that their weights are those of the start: then it is the start's epoch again, and
whatever was stored under it is found. So a sleep costs nothing, and weights that are not on disk never meet those that are.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dejakv.engines.vllm.ranks import RankAnswers
from dejakv.identity import epoch_of

# Words of which one sum goes into the digest.
_ROW = 1 << 16
# Rows at once: their 64-bit copy takes 16 MiB.
_ROWS = 32
# Values of each tensor that a step compares, other ones in each of `_TURNS` turns.
_SAMPLES = 64
_TURNS = 8
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class _WeightSlot:
    """A place in a module for a tensor or packed weights, and its content at the last reading."""

    owner: dict[str, Any]
    name: str
    held: Any


class WeightDigests:
    """Digests of the weights of one worker's model. For one thread at a time, between others' writes.

    A replaced tensor is kept alive until the next check.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._factors = _factors()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._next_number = count()
        self._turn = 0
        self._start = self._latest = self._read()

    def are_those_of_the_start(self) -> bool:
        """Whether all weights, read now, are those of the start. Later calls of `changed` compare with this reading."""
        self._latest = self._read()
        return self._latest == self._start

    def changed(self, *, waiting: bool) -> bool:
        """Whether the weights differ from the last reading. An apparent change is verified by reading all.

        waiting  check values on another device too, which must have finished its work
        """
        if self._unmoved() and self._same_samples(waiting):
            return False
        # A tensor can be moved or written without another value.
        before, self._latest = self._latest, self._read()
        return self._latest != before

    def _read(self) -> bytes:
        # These references keep a tensor's address from being given to another one.
        self._slots = list(self._found())
        self._tensors = [slot.held for slot in self._slots if isinstance(slot.held, torch.Tensor)]
        self._seen = [_mark(tensor) for tensor in self._tensors]
        self._views = [self._strided(turn) for turn in range(_TURNS)]
        self._samples = [_joined(views) for views in self._views]
        return self._digest()

    def _found(self) -> Iterator[_WeightSlot]:
        for module in self._model.modules():
            packed = False
            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        # Kernels that pack weights leave an empty tensor, and hold them in a callable.
                        packed |= not tensor.numel()
                        yield _WeightSlot(owner, name, tensor)
            if packed:
                yield from (
                    _WeightSlot(vars(module), name, value) for name, value in vars(module).items() if callable(value)
                )

    def _unmoved(self) -> bool:
        same = all(slot.owner.get(slot.name) is slot.held for slot in self._slots)
        return same and self._seen == [_mark(tensor) for tensor in self._tensors]

    def _same_samples(self, waiting: bool) -> bool:
        # Reading values would wait for all work that is queued on the device.
        if not waiting and any(tensor.device.type != "cpu" for tensor in self._tensors):
            return True
        self._turn = (self._turn + 1) % _TURNS
        current_samples, previous_samples = _joined(self._views[self._turn]), self._samples[self._turn]
        return all(
            torch.equal(current, previous) for current, previous in zip(current_samples, previous_samples, strict=True)
        )

    def _strided(self, turn: int) -> list[list[torch.Tensor]]:
        """Views of a few values of each tensor, as integers, grouped by device and width."""
        picked: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in self._tensors:
            if tensor.is_contiguous():  # else a view of its words is a copy: its version is all that is looked at
                words = _words(tensor)
                step = max(1, words.numel() // _SAMPLES)
                picked.setdefault((words.device, words.dtype), []).append(
                    words[turn * step // _TURNS :: step][:_SAMPLES]
                )
        return list(picked.values())

    def _digest(self) -> bytes:
        """Names, types, shapes and contents. Contents by a sum of words times secret random factors modulo 2^64, which two
        different rows share with a chance of at most 2^-32, at the speed of memory and on the device that holds them."""
        sha = hashlib.sha256()
        with torch.inference_mode():
            for slot in self._slots:
                if not isinstance(slot.held, torch.Tensor):
                    sha.update(f"{slot.name}|{self._number(slot.held)}|".encode())
                    continue
                sha.update(f"{slot.name}|{slot.held.dtype}|{tuple(slot.held.shape)}|".encode())
                for sums in self._sums(_words(slot.held)):
                    sha.update(sums.cpu().numpy().tobytes())
        return sha.digest()

    def _number(self, holder: Any) -> int:
        """A new number for each new holder of packed weights."""
        # Packed content cannot be read, so the object stands for it.
        return self._numbers.setdefault(holder, next(self._next_number))

    def _sums(self, words: torch.Tensor) -> Iterator[torch.Tensor]:
        factors = self._factors(words.device)
        whole = words.numel() // _ROW * _ROW
        for rows in words[:whole].view(-1, _ROW).split(_ROWS):
            yield (rows.to(torch.int64) * factors).sum(1)
        if whole < words.numel():
            rest = words[whole:]
            yield (rest.to(torch.int64) * factors[: rest.numel()]).sum(0, keepdim=True)


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    # Inference tensors count no versions.
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _joined(groups: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(views) for views in groups]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in the widest integers that divide them, one-dimensional; a view where it is contiguous."""
    data = tensor.detach().contiguous().view(-1)
    if not data.numel():
        return data.to(torch.uint8)
    data = data.view(torch.uint8)
    width = next(width for width in _WORDS if data.numel() % width == 0)
    return data.view(_WORDS[width])


def _factors() -> Callable[[torch.device], torch.Tensor]:
    """Random odd 64-bit factors of this process, kept on each device that asks."""
    factors = torch.frombuffer(bytearray(secrets.token_bytes(8 * _ROW)), dtype=torch.int64) | 1
    by_device: dict[torch.device, torch.Tensor] = {}
    return lambda device: by_device.setdefault(device, factors.to(device))


log = logging.getLogger("dejakv.vllm")

CHANGED = "the weights were changed without a reset"
RESET = "a reset: the weights may have changed"


class WeightsWatch:
    """Watches one worker's weights. Without `weights` it notices nothing, and never reports those of the start."""

    def __init__(self, weights: WeightDigests | None) -> None:
        self._weights = weights
        self._generation = 0
        self._said: list[tuple[int, bool]] = []
        self._changed = False
        self._told = False

    @classmethod
    def of(cls, model: torch.nn.Module | None) -> "WeightsWatch":
        """Reads the weights of the model (`bind`)."""
        if model is None:
            log.warning(
                "vLLM does not show this connector its model, so that changed weights are NOT noticed: after each change reset vLLM's caches"
                " with this connector, or answers come from old weights. Add --worker-extension-cls"
                " dejakv.engines.vllm.bind.WorkerExtension to have them watched"
            )
        else:
            log.info("the weights are watched: after a change of them nothing is reused or stored until a reset")
        return cls(None if model is None else WeightDigests(model))

    @property
    def problem(self) -> str:
        """Why nothing may be stored or used now; empty if it may."""
        return CHANGED if self._changed else ""

    def step(self, generation: int, *, computing: bool, using: bool) -> bool:
        """Check the weights, once a step, before anything is stored or used. Returns whether the step begins a generation.

        computing  prompt tokens are computed in this step, and may be stored later
        using      state is stored or used in this step
        """
        begins = generation != self._generation
        if begins:
            same = self._weights is not None and self._weights.are_those_of_the_start()
            # The reset has dropped what an earlier change spoiled.
            self._generation, self._changed, self._told = generation, False, False
            self._said.append((generation, same))
        elif (
            self._weights is not None
            and not self._changed
            and (computing or using)
            and self._weights.changed(waiting=using)
        ):
            self._changed = True
            log.warning("%s: nothing is stored or reused until the next reset of the prefix cache", CHANGED)
        return begins

    def take(self) -> tuple[list[tuple[int, bool]], bool]:
        """News for the scheduler side: generations with whether their weights are those of the start, and whether a change
        was noticed."""
        reports, self._said = self._said, []
        news = self._changed and not self._told
        self._told = self._told or news
        return reports, news


UNCLEAN = "blocks from before the reset are in use: reset again when no request runs"


class WeightGenerations:
    """Epoch of the weights over resets of the prefix cache: the first one again if every rank finds the weights unchanged, else random. For
    the engine loop alone, except `epoch`, which any thread may read.

    number   of the present generation; state of another one is neither stored nor used
    problem  why nothing is stored or reused in it, or ""
    unknown  whether answers of workers about their weights are missing
    """

    def __init__(self, start: str, ranks: int) -> None:
        self._start = start
        self._ranks = ranks
        self.epoch = start
        self.number = 0
        self.problem = ""
        self._answers = RankAnswers[bool](ranks)
        self.unknown = False

    def begin(self, problem: str = "") -> None:
        """Begin a generation at a reset: earlier state is not used. With a `problem` nothing is stored or used in it either."""
        self.number += 1
        self.problem = problem
        self.epoch = epoch_of({"start": self._start, "generation": secrets.token_hex(16)})
        # Answers about the generation before must not be counted with new ones.
        self._answers = RankAnswers[bool](self._ranks)
        self.unknown = True

    def heard(self, number: int, same: bool) -> None:
        """Take a worker's answer: whether its weights of that generation are those of the start."""
        # A late answer is about weights that may have changed since.
        answers = self._answers.add(str(number), same) if number == self.number else None
        if answers is not None:
            self.unknown = False
            if all(answers):
                self.epoch = self._start

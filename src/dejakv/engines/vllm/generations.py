"""Epochs of the weights, which may change while a server runs.

Every reset of the connector begins a generation. State of a new generation is under a random epoch
that no other process has, until all workers have said that their weights are those of the start.
Then the epoch is that of the start again, and whatever was stored under it is found. So a sleep
costs nothing, and weights that are not on disk never meet those that are.
"""

import hashlib
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dejakv.engines.vllm.device import CudaCopies
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
    content: Any


class WeightComparison:
    """A comparison of a few weights with their last reading, which a GPU makes when it gets to it.

    Parameters
    ----------
    copies : CudaCopies
        Copies of the device that holds the weights.
    differs : Tensor
        Whether the weights differ, on the device.
    """

    def __init__(self, copies: CudaCopies, differs: torch.Tensor) -> None:
        self._differs, self._event = copies.download(differs)

    @property
    def done(self) -> bool:
        """Whether the result is known. The host waits for nothing."""
        return self._event.query()

    def differs(self) -> bool:
        """Return whether the weights differ; wait for the result until it is known."""
        if not self.done:
            self._event.synchronize()
        return bool(self._differs)


class WeightDigests:
    """Digests of the weights of one worker's model.

    For one thread at a time, between others' writes. A replaced tensor is kept alive until the next
    check.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._factors = _factors()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._next_number = count()

        self._turn = 0
        self._start = self._latest = self._read()

    def are_those_of_the_start(self) -> bool:
        """Read all weights, and tell whether they are those of the start.

        Later calls of `changed` compare with this reading.
        """
        self._latest = self._read()
        return self._latest == self._start

    def changed(self, *, waiting: bool) -> bool:
        """Tell whether the weights differ from the last reading.

        An apparent change is verified by reading all weights.

        Parameters
        ----------
        waiting : bool
            Also check values on another device than the CPU, which then must finish its work first.
        """
        return not (self._unmoved() and self._same_samples(waiting)) and self.reread()

    def reread(self) -> bool:
        """Read all weights again, and tell whether they differ from the last reading.

        A tensor can be moved or written without another value.
        """
        before, self._latest = self._latest, self._read()
        return self._latest != before

    @property
    def device(self) -> torch.device | None:
        """The GPU that holds weights, or None without any on one."""
        return next((part.device for part in self._tensors if part.device.type == "cuda"), None)

    def compare(self, copies: CudaCopies) -> WeightComparison:
        """Start to compare the same values as `changed`, without a wait of the host."""
        current, previous = self._next_samples()
        differing = [(now != before).any() for now, before in zip(current, previous, strict=True)]
        on_device = [each for each in differing if each.device.type == "cuda"]
        if not on_device:
            on_device = [torch.zeros((), dtype=torch.bool, device=self.device)]
        differs = on_device[0] if len(on_device) == 1 else torch.stack(on_device).any()
        if any(bool(each) for each in differing if each.device.type != "cuda"):
            differs = torch.ones_like(differs)
        return WeightComparison(copies, differs)

    def _read(self) -> bytes:
        # These references keep a tensor's address from being given to another one.
        self._slots = list(self._found())
        self._tensors = [
            slot.content for slot in self._slots if isinstance(slot.content, torch.Tensor)
        ]

        self._marks = [_mark(tensor) for tensor in self._tensors]
        self._views = [self._strided(turn) for turn in range(_TURNS)]
        self._samples = [_joined(views) for views in self._views]

        return self._digest()

    def _found(self) -> Iterator[_WeightSlot]:
        for module in self._model.modules():
            packed = False

            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        # Kernels that pack weights leave an empty tensor,
                        # and hold them in a callable.
                        packed |= not tensor.numel()
                        yield _WeightSlot(owner, name, tensor)

            if packed:
                yield from (
                    _WeightSlot(vars(module), name, value)
                    for name, value in vars(module).items()
                    if callable(value)
                )

    def _unmoved(self) -> bool:
        same = all(slot.owner.get(slot.name) is slot.content for slot in self._slots)

        return same and self._marks == [_mark(tensor) for tensor in self._tensors]

    def _same_samples(self, waiting: bool) -> bool:
        # Reading values would wait for all work that is queued on the device.
        if not waiting and any(tensor.device.type != "cpu" for tensor in self._tensors):
            return True

        return all(
            torch.equal(current, previous)
            for current, previous in zip(*self._next_samples(), strict=True)
        )

    def _next_samples(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return values of the next turn, by device and width: as they are, and as last read."""
        self._turn = (self._turn + 1) % _TURNS
        return _joined(self._views[self._turn]), self._samples[self._turn]

    def _strided(self, turn: int) -> list[list[torch.Tensor]]:
        """Return views of a few values of each tensor, as integers, by device and width."""
        picked: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in self._tensors:
            # A view of another tensor's words would be a copy, so of that one only the
            # version is checked.
            if tensor.is_contiguous():
                words = _words(tensor)
                step = max(1, words.numel() // _SAMPLES)
                picked.setdefault((words.device, words.dtype), []).append(
                    words[turn * step // _TURNS :: step][:_SAMPLES]
                )

        return list(picked.values())

    def _digest(self) -> bytes:
        """Hash names, types, shapes and contents.

        Contents enter as sums of words times secret random factors modulo 2^64. Two different rows
        share a sum with a chance of at most 2^-32. The sums run at the speed of memory, on the
        device that holds the weights.
        """
        sha = hashlib.sha256()
        with torch.inference_mode():
            for slot in self._slots:
                if not isinstance(slot.content, torch.Tensor):
                    sha.update(f"{slot.name}|{self._number(slot.content)}|".encode())
                    continue
                sha.update(
                    f"{slot.name}|{slot.content.dtype}|{tuple(slot.content.shape)}|".encode()
                )
                for sums in self._sums(_words(slot.content)):
                    sha.update(sums.cpu().numpy().tobytes())

        return sha.digest()

    def _number(self, holder: Any) -> int:
        """Return the number of a holder of packed weights, a new number for each new holder."""
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
    """Return the tensor's bytes in the widest integers that divide them, one-dimensional.

    The result is a view where the tensor is contiguous.
    """
    data = tensor.detach().contiguous().view(-1)
    if not data.numel():
        return data.to(torch.uint8)

    data = data.view(torch.uint8)
    width = next(width for width in _WORDS if data.numel() % width == 0)

    return data.view(_WORDS[width])


def _factors() -> Callable[[torch.device], torch.Tensor]:
    """Draw random odd 64-bit factors for this process; the result gives them on a device."""
    # Odd factors are invertible modulo 2^64, so that a change of a single word changes its sum.
    factors = torch.frombuffer(bytearray(secrets.token_bytes(8 * _ROW)), dtype=torch.int64) | 1

    by_device: dict[torch.device, torch.Tensor] = {}
    return lambda device: by_device.setdefault(device, factors.to(device))


log = logging.getLogger("dejakv.vllm")

CHANGED = "the weights were changed without a reset"
RESET = "a reset: the weights may have changed"


class WeightsWatch:
    """Watches one worker's weights.

    Without `weights` no change is noticed, and the weights are never reported as those of the
    start. On a GPU the result of a check is read when it has come, a step later: what was stored or
    used meanwhile waits for it (`begun`, `passed`).
    """

    def __init__(self, weights: WeightDigests | None) -> None:
        self._weights = weights
        device = None if weights is None else weights.device
        self._copies = None if device is None else CudaCopies(device)
        self._comparisons: deque[tuple[int, WeightComparison]] = deque()
        self.begun = 0
        self._generation = 0
        self._reports: list[tuple[int, bool]] = []
        self._changed = False
        self._change_reported = False

    @classmethod
    def for_model(cls, model: torch.nn.Module | None) -> "WeightsWatch":
        """Read the weights of the model (`bind.watched_model`), or warn that none is watched."""
        if model is None:
            log.warning(
                "vLLM does not show this connector its model, so that changed weights are NOT "
                "noticed: after each change reset vLLM's caches"
                " with this connector, or answers come from old weights. Add --worker-extension-cls"
                " dejakv.engines.vllm.bind.WorkerExtension to have them watched"
            )
        else:
            log.info(
                "the weights are watched: after a change of them nothing is reused or stored until "
                "a reset"
            )
        return cls(None if model is None else WeightDigests(model))

    @property
    def problem(self) -> str:
        """Why nothing may be stored or used now; empty if it may."""
        return CHANGED if self._changed else ""

    def step(self, generation: int, *, computing: bool, using: bool) -> bool:
        """Check the weights, once a step, before anything is stored or used.

        Parameters
        ----------
        generation : int
            The scheduler's number of the generation.
        computing : bool
            Prompt tokens are computed in this step, and may be stored later.
        using : bool
            State is stored or used in this step.

        Returns
        -------
        bool
            Whether the step begins a generation.
        """
        begins = generation != self._generation
        if begins:
            same = self._weights is not None and self._weights.are_those_of_the_start()
            # The reset has dropped what an earlier change spoiled.
            self._generation, self._changed, self._change_reported = generation, False, False
            self._reports.append((generation, same))
            self._comparisons.clear()
        elif self._weights is not None and not self._changed and (computing or using):
            on_device = self._copies is not None
            if self._weights.changed(waiting=using and not on_device):
                self._note_change()
            elif self._copies is not None and using:
                self.begun += 1
                self._comparisons.append((self.begun, self._weights.compare(self._copies)))

        self.passed(self.begun)
        return begins

    @property
    def comparison(self) -> WeightComparison | None:
        """The latest check under way, for a thread to wait for; None without any."""
        return self._comparisons[-1][1] if self._comparisons else None

    def passed(self, number: int) -> bool:
        """Tell whether all checks up to a number of `begun` have come back. The host never waits.

        What they tell is in `problem`.
        """
        while self._comparisons and self._comparisons[0][1].done:
            _, comparison = self._comparisons.popleft()
            # An apparent change is verified, as `WeightDigests.changed` does.
            if comparison.differs() and not self._changed and self._differ():
                self._note_change()
        return not self._comparisons or self._comparisons[0][0] > number

    def settle(self) -> None:
        """Wait for all checks under way."""
        for _, comparison in self._comparisons:
            comparison.differs()
        self.passed(self.begun)

    def _differ(self) -> bool:
        return self._weights is not None and self._weights.reread()

    def _note_change(self) -> None:
        self._changed = True
        log.warning(
            "%s: nothing is stored or reused until the next reset of the prefix cache", CHANGED
        )

    def take_news(self) -> tuple[list[tuple[int, bool]], bool]:
        """Take the news for the scheduler side.

        Returns
        -------
        reports : list[tuple[int, bool]]
            Generations, each with whether its weights are those of the start.
        changed : bool
            Whether a change was noticed since the last call.
        """
        reports, self._reports = self._reports, []
        news = self._changed and not self._change_reported

        self._change_reported = self._change_reported or news

        return reports, news


UNCLEAN = "blocks from before the reset are in use: reset again when no request runs"


class WeightGenerations:
    """Epoch of the weights over resets of the prefix cache.

    The epoch is the first one again if every rank finds the weights unchanged, and random
    otherwise. For the engine loop alone, except `epoch`, which any thread may read.

    Attributes
    ----------
    epoch : str
        Epoch under which state is stored and found now.
    number : int
        Number of the present generation. State of another one is neither stored nor used.
    problem : str
        Why nothing is stored or reused in it; empty if state may be.
    awaits_answers : bool
        Whether answers of workers about their weights are missing.
    """

    def __init__(self, start: str, ranks: int) -> None:
        self._start = start
        self._ranks = ranks

        self.epoch = start
        self.number = 0
        self.problem = ""
        self._answers = RankAnswers[bool](ranks)
        self.awaits_answers = False

    def begin(self, problem: str = "") -> None:
        """Begin a generation at a reset: earlier state is not used.

        Parameters
        ----------
        problem : str
            Why nothing may be stored or used in the new generation either; empty if state may be.
        """
        self.number += 1
        self.problem = problem
        self.epoch = epoch_of({"start": self._start, "generation": secrets.token_hex(16)})

        # Answers about the generation before must not be counted with new ones.
        self._answers = RankAnswers[bool](self._ranks)
        self.awaits_answers = True

    def record_answer(self, number: int, same: bool) -> None:
        """Record one rank's answer about its weights.

        Answers about earlier generations are ignored. Once all ranks have answered True, the epoch
        is that of the start again.

        Parameters
        ----------
        number : int
            Generation of the answer.
        same : bool
            Whether the rank's weights are those of the start.
        """
        # A late answer is about weights that may have changed since.
        answers = self._answers.add(str(number), same) if number == self.number else None

        if answers is not None:
            self.awaits_answers = False
            if all(answers):
                self.epoch = self._start

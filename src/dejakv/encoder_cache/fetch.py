"""The one implementation of `get_or_compute`, and its two forms.

`fetch` is a generator of steps that does none of them itself: lead these errands, or wait for this flight. `drive`
does the steps for threads, `adrive` for asyncio tasks.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from contextvars import copy_context
from typing import Any

from dejakv.encoder_cache.block import VisualEmbeddingBlock
from dejakv.encoder_cache.errand import Batch, Errand, Wanted
from dejakv.encoder_cache.registry import Registry
from dejakv.encoder_cache.single_flight import Abandoned, Flight
from dejakv.errors import InputError

Compute = Callable[[list[int]], Any]
"""Encodes the keys of these indices; returns their embeddings, or (for `adrive`) an awaitable of them."""

Steps = Generator[list[Errand] | Flight, Any, list[VisualEmbeddingBlock]]


def fetch(registry: Registry, wanted: Sequence[Wanted]) -> Steps:
    """Yields errands to lead or a flight to wait for; receives the flight's block; returns a block for each request.

    It leads all its errands before it waits for any flight, so two callers with common keys never wait for each other.
    """
    found: dict[int, VisualEmbeddingBlock] = {}
    while len(found) < len(wanted):
        errands: list[Errand] = []
        with ExitStack() as stack:
            followed: list[tuple[int, Flight, Callable[[VisualEmbeddingBlock], None]]] = []
            stack.callback(_drop_unbegun, registry, errands)
            for index in (index for index in range(len(wanted)) if index not in found):
                block, flight, leads = registry.begin(wanted[index])
                if block is not None:
                    found[index] = block
                elif flight is not None and leads:
                    errands.append(Errand(index, wanted[index], flight))
                elif flight is not None:
                    followed.append((index, flight, stack.enter_context(registry.waiting(flight))))
            if errands:
                yield errands
            for errand in errands:
                with suppress(Abandoned):
                    found[errand.index] = yield errand.flight
            for index, flight, arrived in followed:
                with suppress(Abandoned):
                    found[index] = yield flight
                    arrived(found[index])
    return [found[index] for index in range(len(wanted))]


def drive(registry: Registry, wanted: Sequence[Wanted], compute: Compute) -> list[VisualEmbeddingBlock]:
    """Does the steps on this thread."""
    steps = fetch(registry, wanted)
    try:
        step = next(steps)
        while True:
            try:
                done = step.wait() if isinstance(step, Flight) else _lead(registry, step, compute)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(done)
    except StopIteration as end:
        return end.value


async def adrive(registry: Registry, wanted: Sequence[Wanted], compute: Compute) -> list[VisualEmbeddingBlock]:
    """Does the steps on this event loop; the encoder runs out of reach of any caller's cancellation."""
    steps = fetch(registry, wanted)
    try:
        step = next(steps)
        while True:
            try:
                done = await step.arrival() if isinstance(step, Flight) else _start(registry, step, compute)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(done)
    except StopIteration as end:
        return end.value


def alone(compute: Callable[[], Any]) -> Compute:
    """`compute` for one key in the form for several."""
    if is_async(compute):

        async def embedding_alone(indices: list[int]) -> list[Any]:
            return [await compute()]

        return embedding_alone

    def embedding(indices: list[int]) -> list[Any]:
        return [_not_awaitable(compute())]

    return embedding


def is_async(compute: Callable[..., Any]) -> bool:
    """Whether a call of it returns an awaitable."""
    return inspect.iscoroutinefunction(compute) or inspect.iscoroutinefunction(type(compute).__call__)


def _lead(registry: Registry, errands: list[Errand], compute: Compute) -> None:
    with registry.lead(errands):
        registry.recall_all(errands)
        batch = Batch(errands)
        if batch.indices:
            batch.deliver(_not_awaitable(compute(batch.indices)))


async def _alead(registry: Registry, errands: list[Errand], compute: Callable[[list[int]], Awaitable[Any]]) -> None:
    with registry.lead(errands):
        if registry.tier is not None:
            await asyncio.to_thread(registry.recall_all, errands)
        batch = Batch(errands)
        if batch.indices:
            batch.deliver(await compute(batch.indices))


def _start(registry: Registry, errands: list[Errand], compute: Compute) -> None:
    loop = asyncio.get_running_loop()
    if is_async(compute):
        task = loop.create_task(_alead(registry, errands, compute))
        for errand in errands:
            errand.flight.led_by(task)
            task.add_done_callback(
                lambda _, flight=errand.flight: registry.abandon(flight)
            )  # cancelled before it began
    else:
        context = copy_context()
        loop.run_in_executor(None, lambda: context.run(_lead, registry, errands, compute))
    for errand in errands:
        errand.begun = True


def _drop_unbegun(registry: Registry, errands: list[Errand]) -> None:
    for errand in errands:
        if not errand.begun:
            registry.abandon(errand.flight)


def _not_awaitable(output: Any) -> Any:
    if inspect.iscoroutine(output):
        output.close()
        raise InputError("`compute` is asynchronous: pass an `async def` to `await aget_or_compute(...)`")
    return output

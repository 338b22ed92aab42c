"""A trace: for each request its length and its blocks, and no text.

The format is Mooncake's, which vLLM's benchmarks read too: JSON lines with `hash_ids` and
`input_length` (tokens). A hash id names a block together with everything before it, so equal ids
are equal prefixes. A log of prompts becomes a trace by a tokenizer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.datasets.files import json_lines
from dejakv.datasets.log import RequestLog
from dejakv.errors import DatasetError, InputError
from dejakv.experiments.samples import SamplePrompter, tokenizer_of
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.shares import BLOCK
from dejakv.settings import display

BLOCKS = (512, 256, 128, 64, 32, 16)
"""Tokens in a block that are tried if none is given: Mooncake's first, then those of engines."""


@dataclass(frozen=True)
class Call:
    """One request: `tokens` of the prompt, and its `blocks`, of which the last may be partial."""

    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in their order. `block`: tokens in a block."""

    calls: tuple[Call, ...]
    block: int

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Tokens of each block, by its id; less than `block` only at the end of a prompt."""
        sizes: dict[int, int] = {}
        for call in self.calls:
            if call.blocks:
                sizes.update(dict.fromkeys(call.blocks[:-1], self.block))
                last = call.blocks[-1]
                part = min(self.block, call.tokens - self.block * (len(call.blocks) - 1))
                sizes[last] = max(part, sizes.get(last, 0))
        return sizes

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all different blocks: the size of a cache that forgets nothing, in the end."""
        return sum(self.sizes.values())

    def reusable(self, call: Call, held: int) -> int:
        """Tokens of a prompt that are not computed if its first `held` blocks are there.

        The last token always is.
        """
        return max(0, min(held * self.block, call.tokens - 1))


def load(path: Path, model: str, block: int | None = None) -> Trace:
    """Return a trace from a file with `hash_ids`, or from a log of prompts (`--dataset log`).

    The tokenizer of `model` reads a log.

    Raises
    ------
    DatasetError, InputError, ModelError
        For a file or a model that cannot be read.
    """
    if not path.is_file():
        raise DatasetError(f"no file {str(path)!r}: give a trace or a log of prompts")
    first = next(iter(json_lines(path)), None)
    if first is None or "hash_ids" in first[1] or "input_length" in first[1]:
        return read_trace(path, block)
    return trace_of(RequestLog(path), RunSettings(model=model))


def trace_of(samples: Iterable[Sample], settings: RunSettings) -> Trace:
    """The trace of samples, in blocks of 16.

    Raises: InputError for pictures, whose tokens only the model knows.
    """
    tokenizer: Any = tokenizer_of(settings)
    prompter = SamplePrompter.for_run(settings, tokenizer)
    names: dict[tuple[object, ...], int] = {}
    calls: list[Call] = []
    for sample in samples:
        if sample.media:
            raise InputError(
                f"sample {sample.id} has pictures: a replay reads texts and traces only"
            )
        request = prompter.request(sample)
        ids = tokenizer(request.prompt, add_special_tokens=False)["input_ids"]
        chain: object = request.partition
        blocks: list[int] = []
        for start in range(0, len(ids), BLOCK):
            chain = names.setdefault((chain, *ids[start : start + BLOCK]), len(names))
            blocks.append(int(chain))
        calls.append(Call(len(ids), tuple(blocks)))
    return Trace(tuple(calls), BLOCK)


def read_trace(path: Path, block: int | None = None) -> Trace:
    """Read a trace.

    Raises
    ------
    DatasetError
        For a file without requests, wrong types, or missing blocks; it names the line.
    """
    calls: list[tuple[str, Call]] = []
    parents: dict[int, int] = {}
    for where, record in json_lines(path):
        call = _call(where, record)
        for before, after in zip((-1, *call.blocks), call.blocks, strict=False):
            if parents.setdefault(after, before) != before:
                raise DatasetError(
                    f"{where}: block {after} follows another block than in an earlier request: give"
                    " a trace without missing blocks, whose ids name a block with everything"
                    " before it"
                )
        calls.append((where, call))
    if not calls:
        raise DatasetError(
            f"the trace {path.name!r} has no requests: give a file with one request a line"
        )
    for size in (block,) if block is not None else BLOCKS:
        wrong = next((where for where, call in calls if not _fits(call, size)), None)
        if wrong is None:
            return Trace(tuple(call for _, call in calls), size)
    tried = (
        f"blocks of {block} do not fit {wrong}"
        if block is not None
        else f"no size of {BLOCKS} fits all requests"
    )
    raise DatasetError(
        f"the trace {path.name!r} has missing blocks: {tried}; give the right size with --block"
    )


def _call(where: str, record: Mapping[str, Any]) -> Call:
    ids, tokens = record.get("hash_ids"), record.get("input_length")
    if (
        not isinstance(ids, list)
        or not all(type(one) is int for one in ids)
        or len(set(ids)) < len(ids)
    ):
        raise DatasetError(
            f"{where}: hash_ids={display(ids)} is no list of different integers: give the prompt's"
            " blocks"
        )
    if type(tokens) is not int or tokens < 1:
        raise DatasetError(
            f"{where}: input_length={display(tokens)} is no number of tokens: give an integer of 1"
            " or more"
        )
    return Call(tokens, tuple(ids))


def _fits(call: Call, size: int) -> bool:
    """Whether a prompt has as many ids as blocks. The last, partial block may lack its id."""
    return len(call.blocks) in (call.tokens // size, -(-call.tokens // size))

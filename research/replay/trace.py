"""A trace: for each request its length and its blocks, and no text.

The format is Mooncake's, which vLLM's benchmarks read too: JSON lines with `hash_ids`, `input_length` (tokens) and, if known,
`timestamp` (milliseconds). A hash id names a block together with everything before it, so equal ids are equal prefixes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dejakv.datasets.files import json_lines
from dejakv.errors import DatasetError
from dejakv.settings import shown

BLOCKS = (512, 256, 128, 64, 32, 16)
"""Tokens in a block that are tried if none is given: Mooncake's first, then those of engines."""


@dataclass(frozen=True)
class Call:
    """One request: `tokens` of the prompt, the `blocks` it consists of (the last may be partial), `time` in milliseconds."""

    tokens: int
    blocks: tuple[int, ...]
    time: float | None = None


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
        """Tokens of all different blocks: what a cache that forgets nothing holds in the end."""
        return sum(self.sizes.values())

    def reusable(self, call: Call, held: int) -> int:
        """Tokens of a prompt that are not computed if its first `held` blocks are there. The last token always is."""
        return max(0, min(held * self.block, call.tokens - 1))


def read_trace(path: Path, block: int | None = None) -> Trace:
    """Raises: DatasetError naming the line, for a file without requests, wrong types, missing blocks, time that runs backwards,
    or a block that follows different blocks."""
    calls: list[Call] = []
    places: list[str] = []
    seen: dict[int, int] = {}
    parents: dict[int, int] = {}
    before: float | None = None
    for where, record in _lines(path):
        call = _call(where, record, seen)
        if call.time is not None:
            if before is not None and call.time < before:
                raise DatasetError(
                    f"{where}: timestamp {call.time:g} is before the last one, {before:g}: sort the trace"
                )
            before = call.time
        _check_chain(where, call.blocks, parents)
        calls.append(call)
        places.append(where)
    if not calls:
        raise DatasetError(f"the trace {path.name!r} has no requests: give a file with one request a line")
    return Trace(tuple(calls), _block_size(calls, places, block))


def write_trace(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes a trace. Raises: ConfigError if the file exists or cannot be written."""
    from dejakv.experiments.output import make_folder, refuse_existing, replace_file

    refuse_existing(path, "the trace")
    make_folder(path.parent, "the folder")
    replace_file(path, "".join(json.dumps(record) + "\n" for record in records), "the trace")


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        yield from json_lines(path)
    except OSError as error:
        raise DatasetError(f"cannot read the trace {str(path)!r} ({error.strerror}): give a .jsonl file") from error


def _call(where: str, record: Mapping[str, Any], seen: dict[int, int]) -> Call:
    ids, tokens, time = record.get("hash_ids"), record.get("input_length"), record.get("timestamp")
    if not isinstance(ids, list) or not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise DatasetError(
            f"{where}: hash_ids={shown(ids)} is no list of integers: give the ids of the prompt's blocks"
        )
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise DatasetError(
            f"{where}: input_length={shown(tokens)} is no number of tokens: give an integer of 1 or more"
        )
    if time is not None and (not isinstance(time, int | float) or isinstance(time, bool)):
        raise DatasetError(
            f"{where}: timestamp={shown(time)} is no time: give milliseconds, or leave it out everywhere"
        )
    if len(set(ids)) < len(ids):
        raise DatasetError(
            f"{where}: a block occurs twice in hash_ids: an id must name a block with everything before it"
        )
    return Call(tokens, tuple([seen.setdefault(id, id) for id in ids]), time)


def _check_chain(where: str, blocks: Sequence[int], parents: dict[int, int]) -> None:
    before = -1
    for place, block in enumerate(blocks):
        parent = parents.setdefault(block, before)
        if parent != before:
            others = "the beginning" if parent == -1 else f"block {parent}"
            here = "the beginning" if place == 0 else f"block {before}"
            raise DatasetError(
                f"{where}: block {block} follows {here}, and {others} in an earlier request: an id must name a block with "
                "everything before it; give a trace without missing blocks"
            )
        before = block


def _block_size(calls: Sequence[Call], places: Sequence[str], given: int | None) -> int:
    """The size under which every prompt has as many ids as it has blocks. The last, partial block may lack its id."""
    for size in (given,) if given is not None else BLOCKS:
        wrong = next((n for n, call in enumerate(calls) if not _fits(call, size)), None)
        if wrong is None:
            return size
        if given is not None:
            call = calls[wrong]
            raise DatasetError(
                f"{places[wrong]}: {len(call.blocks)} hash_ids for {call.tokens} tokens do not fit blocks of {size}: blocks are "
                "missing, or --block is another"
            )
    raise DatasetError(
        f"no size of blocks ({', '.join(map(str, BLOCKS))}) fits the numbers of hash_ids and tokens of all requests: blocks are "
        "missing; give the right size with --block to learn in which line"
    )


def _fits(call: Call, size: int) -> bool:
    return len(call.blocks) in (call.tokens // size, -(-call.tokens // size))

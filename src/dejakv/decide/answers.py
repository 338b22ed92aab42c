"""Answers that are stored with their prompt: what the entry says of a greedy one, to label others by it and, where the settings say
`answers=keep`, to return it as it is: no token is computed or decoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dejakv.request import Sampling
from dejakv.store.base import ChunkMeta

_NOTE = "kept"
"""Entry of a chunk's `metadata`: the sampling of its answer, the answer's token ids, the dtype, and whether it is bitwise."""
_GREEDY = "greedy"
"""Entry of a chunk's `metadata`: most tokens of the answer that is stored with it, and the ids of its first; only if it is greedy."""


@dataclass(frozen=True)
class KeptAnswer:
    """A stored greedy answer. `arithmetic` and `bitwise`: as in the `Record` of the request that computed it."""

    text: str
    token_ids: tuple[int, ...]
    arithmetic: str = ""
    bitwise: bool = False


def greedy_note(sampling: Sampling, token_ids: Sequence[int]) -> dict[str, Any]:
    """What a chunk's `metadata` says of its answer; nothing for an answer that was sampled."""
    if not sampling.greedy or sampling.num_beams != 1 or sampling.stop:
        return {}
    return {_GREEDY: [sampling.max_new_tokens, *token_ids[:1]]}


def greedy_answer(metadata: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The same read again: how long the greedy answer may be, None if there is none or it is not known, and its first token."""
    found = metadata.get(_GREEDY)
    numbers = cast(list[object], found) if isinstance(found, list) else []
    known = [number for number in numbers if isinstance(number, int)]
    if not known or len(known) != len(numbers) or len(known) > 2:
        return None, ()
    return known[0], tuple(known[1:])


def answer_note(
    sampling: Sampling, token_ids: tuple[int, ...], arithmetic: str, bitwise: bool
) -> Mapping[str, list[Any]]:
    """What a chunk's `metadata` says of its answer; nothing of a sampled one."""
    return {_NOTE: [_of(sampling), list(token_ids), arithmetic, bitwise]} if sampling.greedy else {}


def kept_answer(meta: ChunkMeta, sampling: Sampling | None) -> KeptAnswer | None:
    """The stored answer for this sampling. None without one, for another sampling, for a note that is damaged, and where no stored
    answer is asked for (`sampling` is None)."""
    note = meta.metadata.get(_NOTE)
    if sampling is None or not sampling.greedy or meta.answer is None or not isinstance(note, list):
        return None
    values = cast(list[Any], note)
    if len(values) != 4 or values[0] != _of(sampling) or not isinstance(values[1], list):
        return None
    ids = cast(list[Any], values[1])
    if not all(isinstance(each, int) for each in ids):
        return None
    return KeptAnswer(meta.answer, tuple(ids), str(values[2]), values[3] is True)


def _of(sampling: Sampling) -> list[Any]:
    """What a greedy answer depends on beside the prompt."""
    return [sampling.max_new_tokens, sampling.num_beams, list(sampling.stop)]

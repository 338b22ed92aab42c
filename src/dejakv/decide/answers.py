"""Answers that are stored with their prompt: what the entry says of a greedy one, to label others by it and, where the settings say
`answers=keep`, to return it as it is: no token is computed or decoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    match metadata.get(_GREEDY):
        case [int(most)]:
            return most, ()
        case [int(most), int(first)]:
            return most, (first,)
        case _:
            return None, ()


def answer_note(
    sampling: Sampling, token_ids: tuple[int, ...], arithmetic: str, bitwise: bool
) -> Mapping[str, list[Any]]:
    """What a chunk's `metadata` says of its answer; nothing of a sampled one."""
    return {_NOTE: [_of(sampling), list(token_ids), arithmetic, bitwise]} if sampling.greedy else {}


def kept_answer(meta: ChunkMeta, sampling: Sampling | None) -> KeptAnswer | None:
    """The stored answer for this sampling. None without one, for another sampling, for a note that is damaged, and where no stored
    answer is asked for (`sampling` is None)."""
    if sampling is None or not sampling.greedy or meta.answer is None:
        return None
    match meta.metadata.get(_NOTE):
        case [of, [*ids], dtype, bitwise] if of == _of(sampling) and all(isinstance(each, int) for each in ids):
            return KeptAnswer(meta.answer, tuple(ids), str(dtype), bitwise is True)
        case _:
            return None


def _of(sampling: Sampling) -> list[Any]:
    """What a greedy answer depends on beside the prompt."""
    return [sampling.max_new_tokens, sampling.num_beams, list(sampling.stop)]

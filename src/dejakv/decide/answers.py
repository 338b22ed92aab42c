"""Greedy answers that are stored with their prompt where the settings say `answers=keep`, to return them as they are: no token is computed
or decoded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejakv.request import Sampling
from dejakv.store.base import ChunkMeta

_NOTE = "kept"
"""Entry of a chunk's `metadata`: the sampling of its answer, the answer's token ids, the dtype, and whether it is bitwise."""


@dataclass(frozen=True)
class KeptAnswer:
    """A stored greedy answer. `arithmetic` and `bitwise`: as in the `Record` of the request that computed it."""

    text: str
    token_ids: tuple[int, ...]
    arithmetic: str = ""
    bitwise: bool = False


def answer_note(
    sampling: Sampling, token_ids: tuple[int, ...], arithmetic: str, bitwise: bool
) -> Mapping[str, list[Any]]:
    """Note of a greedy answer for its chunk's `metadata`; empty for a sampled one."""
    return {_NOTE: [_of(sampling), list(token_ids), arithmetic, bitwise]} if sampling.greedy else {}


def kept_answer(meta: ChunkMeta, sampling: Sampling) -> KeptAnswer | None:
    """The stored answer for this sampling. None without one, for another sampling, and for a note that is damaged."""
    if not sampling.greedy or meta.answer is None:
        return None
    match meta.metadata.get(_NOTE):
        case [of, [*ids], dtype, bitwise] if of == _of(sampling) and all(isinstance(each, int) for each in ids):
            return KeptAnswer(meta.answer, tuple(ids), str(dtype), bitwise is True)
        case _:
            return None


def _of(sampling: Sampling) -> list[Any]:
    """Settings that decide a greedy answer, beside the prompt."""
    return [sampling.max_new_tokens, sampling.num_beams, list(sampling.stop)]

"""Greedy answers that are stored with their prompt where the settings say `answers=keep`, to return them as they are: no token is computed
or decoded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejakv.request import Sampling
from dejakv.store.base import ChunkMeta

_NOTE = "kept"
"""Entry of a chunk's `metadata`: the key of its answer, the answer's token ids, the dtype, and whether it is bitwise."""

AnswerKey = tuple[Any, ...]
"""All that decides a greedy answer beside the prompt and the model's state."""


@dataclass(frozen=True)
class KeptAnswer:
    """A stored greedy answer. `arithmetic` and `bitwise`: as in the `Record` of the request that computed it."""

    text: str
    token_ids: tuple[int, ...]
    arithmetic: str = ""
    bitwise: bool = False


def answer_key(sampling: Sampling, generation: str) -> AnswerKey | None:
    """Make the key under which an answer is stored; None for a sampled one, which is never stored.

    generation: `Engine.generation`, a digest of the settings that the request does not name.
    """
    if not sampling.greedy:
        return None
    # A list, as it comes back from JSON: a tuple would never be equal to it.
    return sampling.max_new_tokens, sampling.num_beams, list(sampling.stop), generation


def answer_note(
    key: AnswerKey | None, token_ids: tuple[int, ...], arithmetic: str, bitwise: bool
) -> Mapping[str, list[Any]]:
    """Note of an answer for its chunk's `metadata`; empty without a key."""
    return {_NOTE: [list(key), list(token_ids), arithmetic, bitwise]} if key is not None else {}


def kept_answer(meta: ChunkMeta, key: AnswerKey | None) -> KeptAnswer | None:
    """Return the stored answer of this key. None without a key or an answer, for another key, and for a damaged note."""
    if key is None or meta.answer is None:
        return None
    # Read as a pattern: the metadata may come from another version, or be damaged.
    match meta.metadata.get(_NOTE):
        case [of, [*ids], dtype, bitwise] if of == list(key) and all(isinstance(each, int) for each in ids):
            return KeptAnswer(meta.answer, tuple(ids), str(dtype), bitwise is True)
        case _:
            return None

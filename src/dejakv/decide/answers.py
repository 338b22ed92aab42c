"""Greedy answers that are stored with their prompt where the settings say `answers=keep`.

A stored answer is returned as it is: no token is computed or decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejakv.request import Sampling
from dejakv.store.base import StateInfo

_NOTE = "kept"
"""Key in a stored prompt's `metadata` for its answer.

It holds the answer's key and token ids, the dtype, and whether the answer is bitwise.
"""

AnswerKey = tuple[Any, ...]
"""All that decides a greedy answer beside the prompt and the model's state."""


@dataclass(frozen=True)
class KeptAnswer:
    """A stored greedy answer.

    `arithmetic` and `bitwise` are as in the `Record` of the request that computed it.
    """

    text: str
    token_ids: tuple[int, ...]
    arithmetic: str = ""
    bitwise: bool = False


def answer_key(sampling: Sampling, generation: str) -> AnswerKey | None:
    """Make the key under which an answer is stored.

    Parameters
    ----------
    sampling : Sampling
        Settings of the answer.
    generation : str
        `Engine.generation`, a digest of the settings that the request does not name.

    Returns
    -------
    AnswerKey or None
        None for a sampled answer, which is never stored.
    """
    if not sampling.greedy:
        return None

    # A list, as it comes back from JSON: a tuple would never be equal to it.
    return sampling.max_new_tokens, sampling.num_beams, list(sampling.stop), generation


def answer_note(
    key: AnswerKey | None, token_ids: tuple[int, ...], arithmetic: str, bitwise: bool
) -> Mapping[str, list[Any]]:
    """Return the note of an answer for its prompt's `metadata`; empty without a key."""
    return {_NOTE: [list(key), list(token_ids), arithmetic, bitwise]} if key is not None else {}


def stored_answer(meta: StateInfo, key: AnswerKey | None) -> KeptAnswer | None:
    """Return the stored answer of this key.

    Returns
    -------
    KeptAnswer or None
        None without a key or an answer, for another key, and for a damaged note.
    """
    if key is None or meta.answer is None:
        return None
    # Read as a pattern: the metadata may come from another version, or be damaged.
    match meta.metadata.get(_NOTE):
        case [of, [*ids], dtype, bitwise] if of == list(key) and all(
            isinstance(each, int) for each in ids
        ):
            return KeptAnswer(meta.answer, tuple(ids), str(dtype), bitwise is True)
        case _:
            return None

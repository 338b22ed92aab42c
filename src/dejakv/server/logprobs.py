"""Log probabilities of an answer's tokens, in the forms of OpenAI's completions and chats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejakv.errors import InputError
from dejakv.pipeline import Answer

NO_LOGPROBS = (
    "logprobs: this model's state cannot be continued token by token, or the answer was stored"
    ' and not computed: leave logprobs out, or ask for "reuse": "off"'
)


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of an answer with its log probability and those of the likeliest, in nats.

    They are of the model's distribution, before temperature and `top_p`.
    """

    token: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...]


def token_logprobs(
    answer: Answer, count: int, decode: Callable[[list[int]], str]
) -> tuple[TokenLogprobs, ...]:
    """Return log probabilities from the very state that the answer was decoded from.

    The model runs once more, over the answer's tokens. Call it on the thread that owns the model.

    Parameters
    ----------
    answer : Answer
        The answer.
    count : int
        Likeliest tokens at each place.
    decode : Callable[[list[int]], str]
        The tokenizer's.

    Raises
    ------
    InputError
        Nothing was computed, or the model's state cannot be continued.
    """
    rows = answer.completion.continued(answer.token_ids)
    if rows is None:
        raise InputError(NO_LOGPROBS)
    places: list[TokenLogprobs] = []
    before: list[int] = []
    for token, row in zip(answer.token_ids, rows, strict=True):
        likeliest = np.argsort(-row)[:count].tolist()
        # Alone, a token loses the space before it in some tokenizers.
        start = len(decode(before))
        chosen, *others = [
            (decode([*before, each])[start:], float(row[each])) for each in (token, *likeliest)
        ]
        places.append(TokenLogprobs(*chosen, tuple(others)))
        before = [token]
    return tuple(places)


def logprobs_object(places: Sequence[TokenLogprobs], chat: bool, characters: int) -> dict[str, Any]:
    """Return OpenAI's `logprobs` of a choice.

    Parameters
    ----------
    places : Sequence[TokenLogprobs]
        All tokens of the answer.
    chat : bool
        Whether the choice is a chat completion's.
    characters : int
        Length of the text that is sent: tokens behind it (of a stop sequence) are left out.
    """
    offsets = np.cumsum([0, *(len(place.token) for place in places)]).tolist()
    sent = [place for place, at in zip(places, offsets, strict=False) if at < max(characters, 1)]
    if chat:
        return {
            "content": [
                {
                    **_scored(place.token, place.logprob),
                    "top_logprobs": [_scored(*other) for other in place.likeliest],
                }
                for place in sent
            ],
            "refusal": None,
        }
    return {
        "tokens": [place.token for place in sent],
        "token_logprobs": [place.logprob for place in sent],
        # Of two tokens with one text the likelier counts.
        "top_logprobs": [dict(reversed(place.likeliest)) for place in sent],
        "text_offset": offsets[: len(sent)],
    }


def _scored(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

"""Log probabilities of an answer's tokens in OpenAI's two forms: of chat completions and of completions."""

from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import InputError
from dejakv.pipeline import Answer
from dejakv.server.problems import ELSEWHERE


def told_probabilities(
    tokenizer: Any, answer: Answer, found: NDArray[np.float32] | None, most: int, *, chat: bool
) -> dict[str, Any]:
    """What `logprobs` of a choice says: the model's own probabilities, before temperature and `top_p`.

    found  log probabilities `[tokens, vocabulary]` of the answer's tokens
    most   likeliest tokens to name at each place

    Raises: InputError where the model gives none of this prompt.
    """
    ids = answer.token_ids
    if found is None and ids:
        raise InputError(f"this model gives no logprobs of this prompt: leave them out, or use {ELSEWHERE}")
    places: list[tuple[str, float, list[tuple[str, float]]]] = []
    for token, row in zip(ids, found if found is not None else (), strict=True):
        best = np.argsort(row)[::-1][:most]
        likeliest = [(tokenizer.decode([int(one)]), float(row[one])) for one in best]
        places.append((tokenizer.decode([token]), float(row[token]), likeliest))
    if chat:
        return {
            "content": [
                {**_entry(text, logs), "top_logprobs": [_entry(*one) for one in likeliest]}
                for text, logs, likeliest in places
            ],
            "refusal": None,
        }
    texts = [text for text, _, _ in places]
    return {
        "tokens": texts,
        "token_logprobs": [logs for _, logs, _ in places],
        "top_logprobs": [dict(likeliest) for _, _, likeliest in places] if most else None,
        "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
    }


def _entry(text: str, logs: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logs, -9999.0), "bytes": list(text.encode())}

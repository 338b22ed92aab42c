"""Log probabilities of an answer's tokens, in the forms of OpenAI's completions and chats."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dejakv.errors import InputError
from dejakv.pipeline import Answer

NO_LOGPROBS = (
    "logprobs: this model's state cannot be continued token by token: leave logprobs out, or ask"
    ' for "reuse": "off"'
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log probability in nats.

    `text` of a token that is a part of a character is `bytes:` and the bytes, as OpenAI writes it,
    or `token_id:` and the id where the tokenizer tells no bytes (`data` is None).
    """

    text: str
    data: bytes | None
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of an answer, and the likeliest of its place.

    They are of the model's distribution, before temperature and `top_p`. `offset` counts the
    characters that are complete before the token.
    """

    token: ScoredToken
    likeliest: tuple[ScoredToken, ...]
    offset: int


class _TokenTexts:
    """Texts and bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alone = cache(self._decode)

    def scored(self, token: int, before: Sequence[int], logprob: float) -> ScoredToken:
        """Return a token behind a whole token before it, if there is any."""
        if self.is_part(token):
            data = self._bytes(token)
            if data is None:
                return ScoredToken(f"token_id:{token}", None, logprob)
            try:
                return ScoredToken(data.decode(), data, logprob)
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
                return ScoredToken(name, data, logprob)

        # Alone, a token loses the space before it in some tokenizers.
        text = self._decode(*before, token)[len(self._alone(*before)) :]
        return ScoredToken(text, text.encode(), logprob)

    def is_part(self, token: int) -> bool:
        """Return whether a token is a part of a character."""
        return _REPLACEMENT in self._alone(token)

    def _decode(self, *tokens: int) -> str:
        return self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)

    def _bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that is a part of a character; None if nobody tells."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if fallback := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(fallback[1])
        # Byte-level vocabularies write each byte as a character.
        values = {character: byte for byte, character in bytes_to_unicode().items()}
        return bytes(values[each] for each in piece) if values.keys() >= set(piece) else None


def token_logprobs(
    answer: Answer, count: int, tokenizer: Any, check: Callable[[], None]
) -> tuple[TokenLogprobs, ...]:
    """Return log probabilities from the very state that the answer was decoded from.

    The model runs once more, over the answer's tokens. Call it on the thread that owns the model.

    Parameters
    ----------
    answer : Answer
        The answer.
    count : int
        Likeliest tokens at each place.
    tokenizer : Any
        The model's tokenizer.
    check : Callable[[], None]
        Called every few tokens; what it raises ends the work.

    Raises
    ------
    InputError
        Nothing was computed, or the model's state cannot be continued.
    """
    from dejakv.engines.transformers.decoding import TextDetokenizer

    texts, detokenizer = _TokenTexts(tokenizer), TextDetokenizer(tokenizer)
    places: list[TokenLogprobs] = []
    before: list[int] = []
    offset = 0
    for rows in answer.completion.continued_in_pieces(answer.token_ids):
        check()
        likeliest = _likeliest(rows, count)
        chosen = answer.token_ids[len(places) : len(places) + len(rows)]
        for token, row, tops in zip(chosen, rows, likeliest, strict=True):
            first, *others = [
                texts.scored(each, before, float(row[each])) for each in (token, *tops)
            ]
            places.append(TokenLogprobs(first, tuple(others), offset))
            offset += len(detokenizer.add(token))
            # Beside a part of a character some tokenizers decode no other byte.
            before = before if texts.is_part(token) else [token]
    if len(places) < len(answer.token_ids):
        raise InputError(NO_LOGPROBS)
    return tuple(places)


def _likeliest(rows: np.ndarray, count: int) -> list[list[int]]:
    """Return the `count` likeliest tokens of each row, the likeliest first."""
    count = min(count, rows.shape[1])
    if not count:
        return [[]] * len(rows)
    tops = np.argpartition(rows, -count, axis=1)[:, -count:]
    order = np.argsort(-np.take_along_axis(rows, tops, 1), axis=1)
    return np.take_along_axis(tops, order, 1).tolist()


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
    sent = [place for place in places if place.offset < max(characters, 1)]
    if chat:
        return {
            "content": [
                {**_scored(place.token), "top_logprobs": [_scored(top) for top in place.likeliest]}
                for place in sent
            ],
            "refusal": None,
        }
    return {
        "tokens": [place.token.text for place in sent],
        "token_logprobs": [place.token.logprob for place in sent],
        # Of two tokens with one text the likelier counts.
        "top_logprobs": [
            {top.text: top.logprob for top in reversed(place.likeliest)} for place in sent
        ],
        "text_offset": [place.offset for place in sent],
    }


def _scored(token: ScoredToken) -> dict[str, Any]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": token.logprob, "bytes": data}

"""Identity of state: whose it is and what it is the state of.

Keys of prefixes are in `store.prefix_keys`.

A key carries the partition (tenant), the epoch and the content. The epoch is a fingerprint of
everything that makes the same tokens give the same state: weights, adapter, tokenizer, processor,
dtype, engine layout. A change of any of these leaves all earlier state behind.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dejakv.errors import InputError

BLOCK_TOKENS = 16
"""Tokens of a block, the unit of names and of exact reuse."""

DEFAULT_PARTITION = "default"


@dataclass(frozen=True)
class MediumSpan:
    """A medium's place in the prompt, `[start, start + length)`, and the medium's digest."""

    start: int
    length: int
    digest: str


def digest_of(*parts: str | bytes) -> str:
    """Return the SHA-256 of the parts, each preceded by its length, as hexadecimal digits.

    The lengths keep two lists of parts from colliding by concatenation. A text and its bytes in
    UTF-8 are the same part.

    Raises
    ------
    InputError
        A part is neither text nor bytes, or is text that UTF-8 cannot encode.
    """
    sha = hashlib.sha256()
    for part in parts:
        data = encode_part(part)
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def check_partition(name: object) -> None:
    """Check that a partition is text that UTF-8 can encode.

    Raises
    ------
    InputError
        It is no such text.
    """
    if not isinstance(name, str):
        raise InputError(
            f"a partition is named by a text, not by a {type(name).__name__}: pass a string"
        )

    encode_part(name)


def check_scope(name: object) -> None:
    """Check a partition, or None for all partitions; raises InputError as `check_partition`."""
    if name is not None:
        check_partition(name)


def epoch_of(parts: Mapping[str, object]) -> str:
    """Return the fingerprint of named parts, 32 hexadecimal digits.

    The order of the names does not matter. A value that is not JSON counts by its `str`.
    """
    return digest_of(json.dumps(parts, sort_keys=True, default=str))[:32]


def media_key(digests: Sequence[str]) -> str:
    """Return one key for a prompt's media in their order, by their digests; empty without media."""
    return digest_of(*digests)[:32] if digests else ""


def exact_key(
    partition: str, epoch: str, token_ids: Sequence[int], media_digests: Iterable[str]
) -> str:
    """Return the identity of a prompt's state, 40 hexadecimal digits: the id of its entry.

    Raises
    ------
    InputError
        A token id is no whole number from 0 to 2^32 - 1, or a name is no text in UTF-8.
    """
    return digest_of("exact", partition, epoch, token_bytes(token_ids), *media_digests)[:40]


def rows_key(
    partition: str,
    epoch: str,
    token_ids: Sequence[int],
    position: int,
    generation: int,
    prompt: str,
    donors: Iterable[str],
) -> str:
    """Return the key of rows that a blend computed, 40 hexadecimal digits; no exact key equals it.

    Parameters
    ----------
    partition, epoch : str
        Partition and model epoch of the rows.
    token_ids : Sequence[int]
        Tokens of the rows.
    position : int
        Position of the first row in the prompt.
    generation : int
        Depth of approximation (`StateInfo.generation`).
    prompt : str
        Key of the blended prompt.
    donors : Iterable[str]
        Ids of the entries whose state the rows attended to.

    Raises
    ------
    InputError
        See `exact_key`.
    """
    place = f"{position}:{generation}"
    return digest_of("rows", partition, epoch, token_bytes(token_ids), place, prompt, *donors)[:40]


def common_prefix(
    first_ids: Sequence[int],
    second_ids: Sequence[int],
    first_spans: Sequence[MediumSpan] = (),
    second_spans: Sequence[MediumSpan] = (),
) -> int:
    """Count the leading tokens that two prompts share, media digests included.

    The shared prefix ends where a span of media differs.
    """
    limit = min(len(first_ids), len(second_ids))
    # Media first: their tokens are equal placeholders, whatever the picture shows.
    for first_span, second_span in zip(first_spans, second_spans, strict=False):
        if first_span != second_span:
            limit = min(limit, first_span.start, second_span.start)
            break
    else:
        # One prompt has media where the other has text that only looks like placeholders.
        extra = first_spans[len(second_spans) :] or second_spans[len(first_spans) :]
        if extra:
            limit = min(limit, extra[0].start)

    for position in range(limit):
        if first_ids[position] != second_ids[position]:
            return position
    return limit


def encode_part(part: object) -> bytes:
    """Return the bytes of a part of a key.

    Raises
    ------
    InputError
        The part is neither text nor bytes, or is text that UTF-8 cannot encode.
    """
    if isinstance(part, bytes):
        return part
    if not isinstance(part, str):
        raise InputError(
            f"a key is made of text, not of a {type(part).__name__}: pass a partition and an epoch "
            "as strings"
        )

    try:
        return part.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{part[:60]!r} is no valid Unicode (a lone surrogate): give a name that UTF-8 can "
            "encode"
        ) from error


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as 32-bit numbers, in a third of the time that numpy takes for a tuple.

    Raises
    ------
    InputError
        A token id is no whole number from 0 to 2^32 - 1.
    """
    try:
        # `array` refuses numbers out of range, which would make two prompts one.
        return array("I", token_ids).tobytes()
    except (TypeError, OverflowError) as error:
        raise InputError(
            f"token ids are whole numbers from 0 to 2^32 - 1 ({error}): pass what the tokenizer "
            "gave"
        ) from error

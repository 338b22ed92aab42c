"""Who a piece of state belongs to and what it is the state of. Keys of prefixes are in `store.keys`.

A key carries the partition (tenant), the epoch (a fingerprint of everything that makes the same tokens give the same
state: weights, adapter, tokenizer, processor, dtype, engine layout) and the content. Change any and nothing old is found.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dejakv.errors import InputError

BLOCK_TOKENS = 16

DEFAULT_PARTITION = "default"


@dataclass(frozen=True)
class MediumSpan:
    """Place of a medium's tokens in the prompt, `[start, start + length)`, and the medium's digest."""

    start: int
    length: int
    digest: str


def digest_of(*parts: str | bytes) -> str:
    """SHA-256 over the parts, each preceded by its length, so that no two lists of parts collide by concatenation.

    Text and the bytes of it in UTF-8 are one part. Raises: InputError for what is neither, or is text that UTF-8 cannot encode.
    """
    sha = hashlib.sha256()
    for part in parts:
        data = encoded(part)
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def check_partition(name: object) -> None:
    """Refuse an invalid partition: no text, or text that UTF-8 cannot encode. Raises: InputError"""
    if not isinstance(name, str):
        raise InputError(f"a partition is named by a text, not by a {type(name).__name__}: pass a string")
    encoded(name)


def check_scope(name: object) -> None:
    """As `check_partition`; None stands for all partitions."""
    if name is not None:
        check_partition(name)


def epoch_of(parts: Mapping[str, object]) -> str:
    """The fingerprint of named parts (JSON-able values), 32 hexadecimal digits; the order of names does not matter."""
    return digest_of(json.dumps(parts, sort_keys=True, default=str))[:32]


def media_key(digests: Sequence[str]) -> str:
    """One key for a prompt's media in their order, given their digests; empty for a prompt without media."""
    return digest_of(*digests)[:32] if digests else ""


def exact_key(partition: str, epoch: str, token_ids: Sequence[int], media_digests: Iterable[str]) -> str:
    """The identity of a prompt's state, 40 hexadecimal digits. It serves as the id of the chunk that holds the state."""
    return digest_of("exact", partition, epoch, _token_bytes(token_ids), *media_digests)[:40]


def rows_key(
    partition: str,
    epoch: str,
    token_ids: Sequence[int],
    position: int,
    generation: int,
    prompt: str,
    donors: Iterable[str],
) -> str:
    """The identity of rows that a blend computed, 40 hexadecimal digits; never an exact key.

    prompt  key of the prompt that was blended; `donors` ids of the chunks that its other state came from
    """
    place = f"{position}:{generation}"
    return digest_of("rows", partition, epoch, _token_bytes(token_ids), place, prompt, *donors)[:40]


def common_prefix(
    first_ids: Sequence[int],
    second_ids: Sequence[int],
    first_spans: Sequence[MediumSpan] = (),
    second_spans: Sequence[MediumSpan] = (),
) -> int:
    """How many leading tokens two prompts share, media digests included: it ends where a span differs."""
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


def encoded(part: object) -> bytes:
    """A part of a key. Raises: InputError for what is neither text nor bytes, or is text that UTF-8 cannot encode."""
    if isinstance(part, bytes):
        return part
    if not isinstance(part, str):
        raise InputError(
            f"a key is made of text, not of a {type(part).__name__}: pass a partition and an epoch as strings"
        )

    try:
        return part.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{part[:60]!r} is no valid Unicode (a lone surrogate): give a name that UTF-8 can encode"
        ) from error


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        # `array` refuses numbers out of range, which would make two prompts one.
        return array("I", token_ids).tobytes()
    except (TypeError, OverflowError) as error:
        raise InputError(
            f"token ids are whole numbers from 0 to 2^32 - 1 ({error}): pass what the tokenizer gave"
        ) from error

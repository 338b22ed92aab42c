"""Names of prefixes: a chain of hashes over blocks of 16 tokens. The last block of a prompt, and one that ends with a medium, may
be shorter."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from dejakv.errors import InputError
from dejakv.identity import BLOCK_TOKENS as BLOCK
from dejakv.identity import MediumSpan, encoded

SIZE = 16
"""Bytes of a key."""

PREFIX = "prefix-"
"""How the id of a prefix begins that no stored prompt consists of."""


class PrefixKeys:
    """The key of each prefix of one prompt. It names partition, epoch, and all tokens and media before its end, so equal keys are
    a proof. A medium counts from the block its first token stands in.

    >>> one, other = PrefixKeys("p", "e", range(40)), PrefixKeys("p", "e", [*range(39), 7])
    >>> one.at(32) == other.at(32), one.at(40) == other.at(40)
    (True, False)

    Raises: InputError for tokens that are not whole numbers from 0 to 2**32 - 1.
    """

    def __init__(self, partition: str, epoch: str, token_ids: Sequence[int], spans: Sequence[MediumSpan] = ()) -> None:
        try:
            self.ids = np.array(token_ids, dtype="<u4")
        except (OverflowError, ValueError, TypeError) as error:
            raise InputError("token ids must be whole numbers from 0 to 2**32 - 1") from error

        self.spans = tuple(spans)
        self._raw = self.ids.tobytes()
        named = [encoded(part) for part in (partition, epoch)]
        # With lengths: otherwise ("ab", "c") and ("a", "bc") would have the same keys.
        label = b"".join(len(part).to_bytes(8, "little") + part for part in named)
        chain = [blake2b(label, digest_size=SIZE).digest()]
        if spans:
            for stop in range(BLOCK, len(self) + 1, BLOCK):
                chain.append(self._next(chain[-1], stop - BLOCK, stop))
        else:
            # `_next` without media, spelled out: this runs for each lookup.
            raw, key = self._raw, chain[0]
            for offset in range(0, len(self) // BLOCK * 4 * BLOCK, 4 * BLOCK):
                key = blake2b(key + raw[offset : offset + 4 * BLOCK], digest_size=SIZE).digest()
                chain.append(key)
        self.full = chain  # of 0, 16, 32, ... tokens

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, tokens: int) -> bytes:
        """The key of the first `tokens` tokens."""
        block, rest = divmod(tokens, BLOCK)
        return self._next(self.full[block], block * BLOCK, tokens) if rest else self.full[block]

    def _next(self, key: bytes, start: int, stop: int) -> bytes:
        # A medium's tokens are placeholders: only its digest tells two apart.
        inside = [f"{s.start}:{s.digest};" for s in self.spans if s.start < stop and s.start + s.length > start]
        # A shorter block must never have the key of a full one.
        short = b"" if stop - start == BLOCK else b"tail"
        return blake2b(
            key + self._raw[4 * start : 4 * stop] + "".join(inside).encode() + short, digest_size=SIZE
        ).digest()


def ends_of(start: int, stop: int, spans: Sequence[MediumSpan]) -> list[int]:
    """Ends of prefixes inside of these rows that have names: of full blocks, of what is before and up to the
    end of a medium, and `stop`."""
    media = {end for span in spans for end in (span.start, span.start + span.length) if start < end < stop}
    # Block ends count from the prompt's beginning, not from `start`.
    return sorted({*range(start // BLOCK * BLOCK + BLOCK, stop + 1, BLOCK), *media, stop})


def prefix_id(tokens: int, key: bytes) -> str:
    """Name a prefix, as an id apart from all stored prompts'."""
    return f"{PREFIX}{tokens}-{key.hex()}"


def prefix_of(id: str) -> tuple[int, bytes] | None:
    """Length and key of a prefix named by `prefix_id`; None for another id."""
    if not id.startswith(PREFIX):
        return None
    try:
        _, tokens, key = id.split("-")
        return int(tokens), bytes.fromhex(key)
    except ValueError:
        return None

"""Names of prefixes: a chain of hashes over blocks of 16 tokens.

The last block of a prompt, and one that ends where a medium begins or ends, may be shorter.
"""

from collections.abc import Container, Iterator, Sequence
from hashlib import blake2b

import numpy as np

from dejakv.identity import BLOCK_TOKENS as BLOCK
from dejakv.identity import MediumSpan, encode_part, token_bytes

SIZE = 16
"""Bytes of a key."""

PREFIX = "prefix-"
"""Beginning of the id of a prefix; no stored prompt's id begins like this."""

SNAPSHOT_NAME = "snapshot-"
"""Beginning of the id of a snapshot."""


class PrefixKeys:
    """The key of each prefix of one prompt.

    A key names partition, epoch, and all tokens and media before its end, so equal keys are a proof
    of equal prefixes. A medium counts from the block in which its first token stands.

    Parameters
    ----------
    partition, epoch : str
        Whose prompt it is, and fingerprint of the model.
    token_ids : Sequence[int]
        Tokens of the prompt.
    spans : Sequence[MediumSpan]
        Media of the prompt.

    Raises
    ------
    InputError
        For tokens that are not whole numbers from 0 to 2**32 - 1.

    Examples
    --------
    >>> one, other = PrefixKeys("p", "e", range(40)), PrefixKeys("p", "e", [*range(39), 7])
    >>> one.prefix_key(32) == other.prefix_key(32), one.prefix_key(40) == other.prefix_key(40)
    (True, False)
    """

    def __init__(
        self, partition: str, epoch: str, token_ids: Sequence[int], spans: Sequence[MediumSpan] = ()
    ) -> None:
        self._raw = token_bytes(token_ids)
        self.ids = np.frombuffer(self._raw, dtype="<u4")
        self.spans = tuple(spans)
        named = [encode_part(part) for part in (partition, epoch)]
        # With lengths: otherwise ("ab", "c") and ("a", "bc") would have the same keys.
        label = b"".join(len(part).to_bytes(8, "little") + part for part in named)
        self._chain = [blake2b(label, digest_size=SIZE).digest()]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def block_keys(self) -> list[bytes]:
        """Keys of 0, 16, 32, ... tokens."""
        self._extend(len(self) // BLOCK)
        return self._chain

    def prefix_key(self, tokens: int) -> bytes:
        """Return the key of the first `tokens` tokens; keys behind them are not computed."""
        block, rest = divmod(tokens, BLOCK)
        self._extend(block)
        key = self._chain[block]
        return self._next(key, block * BLOCK, tokens) if rest else key

    def _extend(self, blocks: int) -> None:
        """Compute the keys of the first `blocks` blocks."""
        chain = self._chain
        begun = len(chain) - 1
        if self.spans:
            for stop in range(begun * BLOCK + BLOCK, blocks * BLOCK + 1, BLOCK):
                chain.append(self._next(chain[-1], stop - BLOCK, stop))
        else:
            # `_next` without media, spelled out: this runs for each lookup.
            raw, key = self._raw, chain[-1]
            for offset in range(4 * BLOCK * begun, 4 * BLOCK * blocks, 4 * BLOCK):
                key = blake2b(key + raw[offset : offset + 4 * BLOCK], digest_size=SIZE).digest()
                chain.append(key)

    def _next(self, key: bytes, start: int, stop: int) -> bytes:
        # A medium's tokens are placeholders: only its digest tells two apart.
        inside = [
            f"{s.start}:{s.digest};"
            for s in self.spans
            if s.start < stop and s.start + s.length > start
        ]

        # A shorter block must never have the key of a full one.
        short = b"" if stop - start == BLOCK else b"tail"
        return blake2b(
            key + self._raw[4 * start : 4 * stop] + "".join(inside).encode() + short,
            digest_size=SIZE,
        ).digest()


def ends_of(start: int, stop: int, spans: Sequence[MediumSpan]) -> list[int]:
    """List the ends of the prefixes with names that end inside rows `start` to `stop - 1`.

    Returns
    -------
    list[int]
        Ends of full blocks, beginnings and ends of media, and `stop`, in order.
    """
    media = {
        end
        for span in spans
        for end in (span.start, span.start + span.length)
        if start < end < stop
    }

    # Block ends count from the prompt's beginning, not from `start`.
    return sorted({*range(start // BLOCK * BLOCK + BLOCK, stop + 1, BLOCK), *media, stop})


def prefix_id(tokens: int, key: bytes) -> str:
    """Name a prefix by an id apart from those of all stored prompts."""
    return f"{PREFIX}{tokens}-{key.hex()}"


def snapshot_id(tokens: int, key: bytes) -> str:
    """Name the snapshot of fixed state behind a prompt's first `tokens` tokens."""
    return f"{SNAPSHOT_NAME}{tokens}-{key.hex()}"


def _snapshot_tokens(id: str) -> int:
    """Return behind how many tokens a snapshot stands, by its id from `snapshot_id`."""
    return int(id.removeprefix(SNAPSHOT_NAME).partition("-")[0])


def stored_snapshots(
    keys: PrefixKeys, stored_ids: frozenset[str], places: Container[int]
) -> Iterator[tuple[int, str]]:
    """Yield the snapshots of a prompt that are stored, the last one first.

    Any entry may have left one, wherever it ended, so that all that stand at a place are looked at.

    Parameters
    ----------
    keys : PrefixKeys
        Keys of the prompt.
    stored_ids : frozenset[str]
        Ids of all snapshots of its partition and epoch.
    places : Container[int]
        Numbers of tokens behind which a snapshot is of use.

    Yields
    ------
    tokens : int
        Number of tokens before the snapshot.
    id : str
        Its id.
    """
    for tokens in sorted({_snapshot_tokens(id) for id in stored_ids}, reverse=True):
        if tokens in places:
            id = snapshot_id(tokens, keys.prefix_key(tokens))
            if id in stored_ids:
                yield tokens, id


def parse_prefix_id(id: str) -> tuple[int, bytes] | None:
    """Return length and key of a prefix named by `prefix_id`; None for another id."""
    if not id.startswith(PREFIX):
        return None
    try:
        _, tokens, key = id.split("-")
        return int(tokens), bytes.fromhex(key)
    except ValueError:
        return None

"""A checksum at memory speed, so that every load of a chunk can be verified.

zlib.crc32 reads 6 GB/s here and blake2b 1.3: verifying a 10 MB chunk would take 6 to 30 times as long as copying it. This
one is a multilinear hash (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): every row of 4096 64-bit
words is multiplied with fixed odd random weights and summed modulo 2**64, at the speed of a copy; blake2b over the row sums
binds them together. One changed word always changes its row's sum (an odd weight has an inverse), any other damage goes
unnoticed with a chance of about 2**-63. It guards against faults, not against a forger who may write to the folder.
"""

import hashlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW_WORDS = 4096
_ROW_BYTES = 8 * ROW_WORDS


@cache
def _weights() -> NDArray[np.uint64]:
    """`ROW_WORDS` odd numbers from splitmix64: the same on every machine and in every version of numpy."""
    state = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


def checksum(data: NDArray[Any], *labels: str) -> str:
    """Checksum of an array's bytes together with `labels` (what the bytes are), 32 hexadecimal digits."""
    octets = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    whole = octets.size // _ROW_BYTES
    rows = octets[: whole * _ROW_BYTES].view("<u8").reshape(whole, ROW_WORDS)
    sums = np.einsum("ij,j->i", rows, _weights())
    tail = np.zeros(_ROW_BYTES, dtype=np.uint8)
    tail[: octets.size - whole * _ROW_BYTES] = octets[whole * _ROW_BYTES :]
    last = np.einsum("i,i->", tail.view("<u8"), _weights())
    sha = hashlib.blake2b(digest_size=16)
    for part in (str(octets.size), *labels):
        encoded = part.encode()
        sha.update(len(encoded).to_bytes(8, "little") + encoded)
    sha.update(sums.astype("<u8").tobytes())
    sha.update(int(last).to_bytes(8, "little"))
    return sha.hexdigest()

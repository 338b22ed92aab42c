"""Ways in which stored bytes go bad."""

import random
from collections.abc import Callable

Damage = Callable[[bytearray, random.Random], bytearray]


def flip_bits(raw: bytearray, rnd: random.Random) -> bytearray:
    for _ in range(rnd.choice((1, 1, 1, 2, 5, 40))):
        raw[rnd.randrange(len(raw))] ^= 1 << rnd.randrange(8)
    return raw


def flip_a_bit_of_the_header(raw: bytearray, rnd: random.Random) -> bytearray:
    raw[rnd.randrange(min(len(raw), 300))] ^= 1 << rnd.randrange(8)
    return raw


def truncate(raw: bytearray, rnd: random.Random) -> bytearray:
    return raw[: rnd.choice((0, 1, len(raw) - 1, rnd.randrange(len(raw))))]


def extend(raw: bytearray, rnd: random.Random) -> bytearray:
    return raw + rnd.randbytes(rnd.choice((1, 8, 4096)))


def lose_a_block(raw: bytearray, rnd: random.Random) -> bytearray:
    """A page that was never written, or was written with something else."""
    start = rnd.randrange(len(raw))
    length = min(rnd.choice((16, 512, 4096)), len(raw) - start)
    raw[start : start + length] = rnd.choice((bytes(length), rnd.randbytes(length)))
    return raw


def noise(raw: bytearray, rnd: random.Random) -> bytearray:
    return bytearray(rnd.randbytes(rnd.choice((len(raw), 8, 100))))


WAYS: tuple[Damage, ...] = (flip_bits, flip_a_bit_of_the_header, truncate, extend, lose_a_block, noise)


def damaged(raw: bytes, rnd: random.Random) -> bytes:
    """Other bytes than `raw`."""
    while True:
        found = bytes(rnd.choice(WAYS)(bytearray(raw), rnd))
        if found != raw:
            return found

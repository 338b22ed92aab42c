"""Answers of a hostile Redis server. None of them is a chunk that was stored, so that every answer of a store is a miss."""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dejakv.attack.canary import pickle_that_touches
from dejakv.attack.fake_redis import Answer, Command
from dejakv.attack.forging import MISTYPED
from dejakv.attack.forging import forged as forge
from dejakv.store.base import Chunk
from dejakv.store.codec import encode
from dejakv.store.metacodec import encode_meta

ENDLESS = 768 << 20
"""Bytes after which an endless answer ends, for the sake of this machine."""
_PIECE = b"x" * (1 << 18)
_POLITE = (b"HELLO", b"CLIENT", b"SELECT", b"PING", b"AUTH")


@dataclass(frozen=True)
class Forged:
    """What a server may have: chunks of others, and a folder in which a pickle leaves a mark."""

    chunk: Chunk
    marks: Path

    @property
    def meta(self) -> bytes:
        return encode_meta(self.chunk.meta)

    @property
    def body(self) -> bytes:
        encoded = encode(self.chunk.meta.id, self.chunk.tensor)
        return encoded.header + encoded.data.tobytes()


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def array(*items: bytes) -> bytes:
    return b"*%d\r\n%s" % (len(items), b"".join(items))


def plain(command: Command, value: bytes) -> bytes:
    """A value in the form that the command expects."""
    name = command[0].upper()
    if name == b"MGET":
        return array(*[bulk(value)] * (len(command) - 1))
    if name in (b"ZRANGE", b"SMEMBERS"):
        return array(bulk(value), bulk(value))
    return bulk(value)


def always(answer: bytes) -> Answer:
    return lambda _: (answer,)


def polite(answer: Answer) -> Answer:
    """Lets a client in before it turns hostile."""
    return lambda command: (b"+OK\r\n",) if command[0].upper() in _POLITE else answer(command)


def _endless_bulk(_: Command) -> Iterator[bytes]:
    yield b"$%d\r\n" % (1 << 40)
    yield from itertools.repeat(_PIECE, ENDLESS // len(_PIECE))


def _endless_line(_: Command) -> Iterator[bytes]:
    yield b"+"
    yield from itertools.repeat(_PIECE, ENDLESS // len(_PIECE))


def _endless_array(_: Command) -> Iterator[bytes]:
    yield b"*2147483647\r\n"
    yield from itertools.repeat(b":1\r\n" * 65536, ENDLESS // 4 // 65536 // 4)


def _drip(_: Command) -> Iterator[bytes]:
    """A byte now and then: each comes in time, the whole never does."""
    yield b"$100000\r\n"
    for _tick in range(400):
        time.sleep(0.1)
        yield b"x"


def _foreign(forged: Forged) -> Answer:
    """A chunk of somebody else, whatever is asked for."""

    def answer(command: Command) -> Iterator[bytes]:
        if command[0].upper() == b"MGET" and len(command) == 3:
            yield array(bulk(forged.meta), bulk(forged.body))
        else:
            yield plain(
                command, forged.meta if command[0].upper() in (b"GET", b"MGET") else forged.chunk.meta.id.encode()
            )

    return answer


def _mistyped(forged: Forged) -> Answer:
    """Descriptions of the chunk that is asked for, with a right checksum and fields of wrong types."""
    turns = itertools.cycle(MISTYPED)

    def answer(command: Command) -> Iterator[bytes]:
        ids = [name.rpartition(b":")[2] for name in command[1:]]
        blobs = (
            [forge(forged.meta, {"id": id.decode(), **next(turns)}) for id in ids]
            if command[0] in (b"GET", b"MGET")
            else []
        )
        if command[0] == b"GET":
            yield bulk(blobs[0])
        elif command[0] == b"MGET":
            yield array(*map(bulk, blobs))
        else:
            yield array(*[bulk(b"%040x" % number) for number in range(len(MISTYPED))])

    return answer


def _others_body(forged: Forged) -> Answer:
    """Descriptions are refused, bodies are of another chunk."""
    return lambda command: (array(b"$-1\r\n", bulk(forged.body)) if command[0].upper() == b"MGET" else b"$-1\r\n",)


def _twice(command: Command) -> Iterator[bytes]:
    """More answers than questions, so that later questions meet the answers of earlier ones."""
    yield plain(command, b"0" * 40) * 3


def tricks(forged: Forged) -> Mapping[str, Answer]:
    """Answers by their names."""
    pickled = pickle_that_touches(forged.marks / "mark")
    hostile: dict[str, Answer] = {
        "integers": always(b":5\r\n"), "words for integers": always(b":many\r\n"), "words for lengths": always(b"$many\r\n"),
        "negative lengths": always(b"$-5\r\n"), "negative counts": always(b"*-7\r\n"), "simple strings": always(b"+OK\r\n"),
        "empty arrays": always(b"*0\r\n"), "empty values": lambda command: (plain(command, b""),),
        "arrays of errors": always(array(b"-ERR a\r\n", b"-ERR b\r\n")), "arrays of arrays": always(array(array(), array())),
        "nested arrays": always(b"*1\r\n" * 100_000), "arrays of nothing": always(array(*[b"$-1\r\n"] * 3)),
        "errors": always(b"-ERR no\r\n"), "loading": always(b"-LOADING wait\r\n"), "moved": always(b"-MOVED 1 127.0.0.1:1\r\n"),
        "no Unicode": lambda command: (plain(command, b"\xff\xfe\x80" * 10),), "a null in an array": always(array(b"$-1\r\n")),
        "a pickle": lambda command: (plain(command, pickled),), "foreign chunks": _foreign(forged), "forged descriptions": _mistyped(forged),
        "bodies of others": _others_body(forged), "more answers than questions": _twice, "endless values": _endless_bulk,
        "endless lines": _endless_line, "endless arrays": _endless_array, "a drip": _drip, "silence": lambda _: (),
        "another protocol's kinds": always(b"%1\r\n+a\r\n+b\r\n"), "a large double": always(b",1e999\r\n"),
    }  # fmt: skip
    unkind: dict[str, Answer] = {
        "garbage": always(bytes(range(256)) * 10), "HTTP": always(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        "a pickle at once": always(pickled), "nothing but errors": always(b"-ERR no\r\n"),
    }  # fmt: skip
    return {name: polite(answer) for name, answer in hostile.items()} | unkind

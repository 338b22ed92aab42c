"""Descriptions that are whole by their checksum, which has no key, and hold what no description holds."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_DIGEST = 16

MISTYPED: tuple[Mapping[str, Any], ...] = (
    {"prompt": 5}, {"chunk": None}, {"created": "now"}, {"created": float("nan")}, {"nbytes": -1}, {"nbytes": 1e300},
    {"generation": "many"}, {"position": True}, {"metadata": [1]}, {"answer": 7}, {"partition": ["p"]}, {"epoch": {}},
    {"prompt": "\ud800"}, {"parent": 3}, {"rows_from": -5}, {"spans": [["0", 1, 2]]}, {"spans": [[0, 10**9, "x"]]},
    {"spans": 7}, {"vectors": [["text", 10**12]]}, {"tokens": -1}, {"tokens": "all"}, {"kind": 1},
)  # fmt: skip


def forged(blob: bytes, changes: Mapping[str, Any]) -> bytes:
    """A blob of `metacodec` with some of its fields changed, and a right checksum."""
    content = blob[_DIGEST:]
    length = int.from_bytes(content[:4], "little")
    body = json.dumps({**json.loads(content[4 : 4 + length]), **changes}).encode()
    made = len(body).to_bytes(4, "little") + body + content[4 + length :]
    return hashlib.blake2b(made, digest_size=_DIGEST).digest() + made

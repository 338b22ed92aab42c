"""Depth and number of values of JSON, counted while it arrives: nothing is built from a body over the limits."""

import re

_MARK = re.compile(rb'[\[\]{},"]')
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


class TooMuchError(ValueError):
    """The JSON is deeper or has more values than allowed; the message says which."""


class JsonScan:
    """Feed it a body piece by piece. It only counts; the parser rejects invalid JSON.

    A value is an item of a list or a field of an object; lists and objects count once more.
    """

    def __init__(self, max_depth: int, max_values: int) -> None:
        self._max_depth = max_depth
        self._max_values = max_values
        self._depth = 0
        self._values = 0
        self._strings = 0
        self._inside = False  # of a string
        self._escaped = False  # the last byte was a backslash
        self._broken = False  # more closed than opened

    def feed(self, piece: bytes) -> None:
        """Raises TooMuchError. Time is linear in the piece; strings are skipped without examining each byte."""
        at = 0
        if self._escaped and piece:
            at, self._escaped = 1, False
        while at < len(piece) and not self._broken:
            at = self._through_string(piece, at) if self._inside else self._to_next_mark(piece, at)

    def _through_string(self, piece: bytes, at: int) -> int:
        found = _STRING.match(piece, at)
        end = found.end() if found else at
        if end == len(piece):
            return end
        if piece[end : end + 1] == b"\\":  # the last byte of the piece: the pattern takes a backslash and what follows
            self._escaped = True
        else:
            self._inside = False
        return end + 1

    def _to_next_mark(self, piece: bytes, at: int) -> int:
        found = _MARK.search(piece, at)
        if found is None:
            return len(piece)
        mark = found.group()
        if mark == b'"':
            self._inside = True
            self._strings += 1
        elif mark == b",":
            self._values += 1
        elif mark in b"[{":
            self._depth += 1
            self._values += 1
        else:
            self._depth -= 1
            self._broken = self._depth < 0
        if self._depth > self._max_depth:
            raise TooMuchError(f"more than {self._max_depth} nested lists and objects")
        # A field has two strings. More strings without commas are not JSON, but would cost time.
        if self._values > self._max_values or self._strings > 2 * self._max_values + 2:
            raise TooMuchError(f"more than {self._max_values} values")
        return found.end()

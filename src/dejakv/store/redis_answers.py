"""What a Redis server may answer, checked: a server that answers otherwise is treated as one that does not answer."""

from collections.abc import Sequence
from typing import Any, cast

from dejakv.errors import StoreError

REASONS = frozenset(("", "bytes", "entries", "parent", "too_large", "changed"))
"""What the scripts answer. Others would be counted under names that the server makes up."""


class Nonsense(StoreError):
    """An answer that no Redis server gives to the question."""


def blob(found: object) -> bytes | None:
    """A value, or None. Raises: Nonsense, as all of these."""
    if found is not None and not isinstance(found, bytes):
        raise Nonsense(f"a value is {_kind(found)}")
    return found


def blobs(found: object, count: int) -> list[bytes | None]:
    """So many values."""
    values = _list(found)
    if len(values) != count:
        raise Nonsense(f"{len(values)} values for {count} names")
    return [blob(value) for value in values]


def names(found: object) -> list[str]:
    """Ids, in their order."""
    return [_text(name) for name in _list(found)]


def count(found: object) -> int:
    """A number, as one or as a value; 0 for None."""
    if found is None:
        return 0
    if isinstance(found, bytes) and len(found) < 20 and found.isdigit():
        return int(found)
    if isinstance(found, int) and 0 <= found < 2**63:
        return found
    raise Nonsense(f"a count is {_kind(found)}")


def gone(found: object) -> list[tuple[str, str, str]]:
    """Removed entries of a script: id, partition, reason."""
    entries = [cast(tuple[str, str, str], tuple(map(_text, _list(entry, 3)))) for entry in _list(found)]
    for _, _, reason in entries:
        _known(reason)
    return entries


def written(found: object) -> str | list[tuple[str, str, str]]:
    """What a script that takes chunks answers: why they are refused, or the removed entries."""
    return _known(_text(found)) if isinstance(found, bytes) else gone(found)


def _list(found: object, length: int | None = None) -> Sequence[Any]:
    if not isinstance(found, list):
        raise Nonsense(f"a list is {_kind(found)}")
    values = cast(list[Any], found)
    if length is not None and len(values) != length:
        raise Nonsense(f"a list has {len(values)} values instead of {length}")
    return values


def _known(reason: str) -> str:
    if reason not in REASONS:
        raise Nonsense("a reason is none of a script's")
    return reason


def _text(found: object) -> str:
    if not isinstance(found, bytes):
        raise Nonsense(f"a name is {_kind(found)}")
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise Nonsense("a name is no UTF-8") from error


def _kind(found: object) -> str:
    return f"of type {type(found).__name__}"

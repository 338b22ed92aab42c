"""The request header `Cache-Control` (RFC 9111, 5.2.1), of which one directive counts here."""

from collections.abc import Iterable


def asks_no_store(values: Iterable[str]) -> bool:
    """Whether one of the header's values has the directive `no-store`."""
    directives = ",".join(values).split(",")
    return any(directive.strip().lower() == "no-store" for directive in directives)

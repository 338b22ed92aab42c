"""Options of keeping: for how long, and who has which part of the budgets. The same for `run` and `serve`."""

from functools import partial
from typing import Annotated, Any

import typer

from dejakv.config import SemanticCacheConfig

_cache = partial(typer.Option, rich_help_panel="Storage")


def _seconds(what: str) -> Any:
    return _cache(help=f"Seconds for which {what} may be used; otherwise as --ttl says.")


Ttl = Annotated[
    float | None,
    _cache(help=f"Seconds for which what is stored may be used; 0: no limit (default: {SemanticCacheConfig.ttl})."),
]
TtlPrompts = Annotated[float | None, _seconds("exact state of prompts")]
TtlRows = Annotated[float | None, _seconds("rows that blends computed")]
TtlEncoder = Annotated[float | None, _seconds("encoder outputs")]
Quotas = Annotated[
    list[str] | None,
    _cache(
        help="NAME=BYTES or NAME=BYTES:ENTRIES: the part of the budgets that a partition has. May be given more than once."
    ),
]
Partitions = Annotated[
    int | None,
    _cache(
        help="How many partitions the budgets are divided among, those with a quota included "
        f"(default: {SemanticCacheConfig.partitions})."
    ),
]

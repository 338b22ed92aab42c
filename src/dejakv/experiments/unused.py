"""State that was found and not used: how often, by whom it was refused, and the most frequent reason."""

from collections import defaultdict
from collections.abc import Mapping

from rich.table import Table

_MOST = 8
_LONGEST = 120


def unused_table(reasons: Mapping[str, int]) -> Table | None:
    """A row a guard or rule, from `not_used` of a summary (reason to requests, most frequent first); None for no reason."""
    if not reasons:
        return None
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for reason, count in reasons.items():
        who, colon, why = reason.partition(": ")
        groups[who if colon else "other"].append((why if colon else reason, count))
    table = Table(title="found and not used")
    for name in ("refused by", "requests", "most frequent reason"):
        table.add_column(name, justify="right" if name == "requests" else "left")
    ordered = sorted(groups.items(), key=lambda item: -sum(count for _, count in item[1]))
    for who, found in ordered[:_MOST]:
        why = max(found, key=lambda item: item[1])[0]
        more = f" (and {len(found) - 1} other reasons)" if len(found) > 1 else ""
        table.add_row(who, str(sum(count for _, count in found)), f"{why[:_LONGEST]}{more}")
    return table

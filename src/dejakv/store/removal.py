"""Removes records with the rows that no other record has, and chooses what a purge takes."""

import secrets
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from dejakv.store import changes
from dejakv.store.base import CorruptChunk
from dejakv.store.catalog import Catalog, reason_of
from dejakv.store.changes import Gone
from dejakv.store.counters import logger
from dejakv.store.keys import ends_of
from dejakv.store.objects import Missing, Objects, Unknown
from dejakv.store.segment import encode, opened
from dejakv.store.selection import Selection

Choose = Callable[[sqlite3.Connection], tuple[list[int], list[int]]]
"""Names records and segments by number."""


class _DryRun(Exception):
    """Ends a transaction without a change."""


def remove(objects: Objects, catalog: Catalog, choose: Choose, *, dry_run: bool = False) -> Gone:
    """Removes the records and segments that `choose` names, with the rows that no other record has. What others share of a segment
    that leaves is stored anew for them. Raises: sqlite3.Error, Unknown"""
    gone = Gone()
    for full in (False, True):
        try:
            with catalog.transaction() as sql:
                records, segments = choose(sql)
                for number, stop in changes.torn(sql, records) if not dry_run else ():
                    _keep_beginning(objects, sql, number, stop, records)
                gone = changes.remove(sql, records, segments, tear=not dry_run)
                if dry_run:
                    raise _DryRun
                if full:
                    objects.delete(gone.objects)  # the commit needs room
            break
        except _DryRun:
            break
        except sqlite3.Error as error:
            if full or reason_of(error) not in ("full", "error"):
                raise
            # The log cannot grow where the disk is full: what is in it is written back.
            with suppress(sqlite3.Error):
                catalog.empty_log()
    return gone


def loose(
    sql: sqlite3.Connection, selection: Selection, ids: Sequence[str], records: Collection[int], now: float
) -> list[int]:
    """Segments that no record needs and a purge of these records takes: of prompts that have left, or were never finished."""
    free = "NOT EXISTS (SELECT 1 FROM links WHERE segment = s.n)"
    if not selection.donors and not selection.media:
        rows = sql.execute(f"SELECT n, partition, epoch, created FROM segments s WHERE {free}").fetchall()
        return [n for n, of, epoch, born in rows if selection.takes(of, epoch, born, now)]
    found: set[int] = set()
    for id in {*selection.donors, *ids}:
        query = f"SELECT n FROM segments s WHERE record = ? AND (?2 IS NULL OR partition = ?2) AND {free}"
        found |= {n for (n,) in sql.execute(query, (id, selection.partition))}
    own = [n for record in records for (n,) in sql.execute("SELECT segment FROM links WHERE record = ?", (record,))]
    ends = [n for n in own if not changes.needed(sql, n, records)]
    return sorted(found | changes.below(sql, [*found, *ends]))


def _keep_beginning(
    objects: Objects, sql: sqlite3.Connection, number: int, stop: int, leaving: Collection[int]
) -> None:
    (name,) = sql.execute("SELECT name FROM segments WHERE n = ?", (number,)).fetchone()
    try:
        whole, tensor = opened(objects.get(name), name)
        ends = [end for end in ends_of(whole.start, whole.stop, whole.spans) if end <= stop]
        if not ends or ends[-1] != stop:
            return
        others = [
            n for (n,) in sql.execute("SELECT record FROM links WHERE segment = ?", (number,)) if n not in leaving
        ]
        record = sql.execute("SELECT id FROM records WHERE n = ?", (others[0],)).fetchone()
        part = replace(
            whole, name=secrets.token_hex(16), stop=stop, keys=whole.keys[: len(ends)], record=record[0],
            spans=tuple(span for span in whole.spans if span.start < stop), ids=whole.ids[: 4 * (stop - whole.start)],
        )  # fmt: skip
        part, buffers = encode(part, tensor.rows(0, stop - whole.start))
        objects.put(part.name, buffers)
    except (CorruptChunk, Missing, Unknown) as error:
        logger.warning("rows that prompts share leave with one of them: %s", error)
        return
    new = changes.add_segment(sql, part)
    query = "UPDATE links SET segment = ? WHERE segment = ? AND record = ?"
    sql.executemany(query, [(new, number, record) for record in others])

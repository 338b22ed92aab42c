"""Puts chunks into a store's folder: their files, then one change of the catalog that names them."""

import sqlite3
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dejakv.errors import StoreError
from dejakv.store import catalog as sql
from dejakv.store import catalog_tree, files, names
from dejakv.store.base import NODE, Chunk
from dejakv.store.catalog_rows import Removed, Row, note
from dejakv.store.codec import Encoded, encode
from dejakv.store.counters import logger
from dejakv.store.eviction import Budget, Policy
from dejakv.store.layout import Layout
from dejakv.store.memory import stamped
from dejakv.store.metacodec import encode_meta
from dejakv.store.usage import PendingUses


class Refused(StoreError):
    """A chunk is not taken; its text is the reason."""


@dataclass(frozen=True)
class Written:
    """What left for a chunk. `evicted`: the reason, for those that were evicted; `replaced` is still there, with another file."""

    gone: Sequence[Removed]
    evicted: Sequence[Removed]
    reason: str
    replaced: str


@dataclass(frozen=True)
class _File:
    row: Row
    encoded: Encoded
    temporary: files.Entry


@dataclass(frozen=True)
class DiskWriter:
    """Writes into one folder. Thread-safe as its parts are."""

    layout: Layout
    catalog: sql.Catalog
    budget: Budget
    policy: Policy
    uses: PendingUses

    def put(self, chunk: Chunk) -> Written:
        """Adds or replaces a chunk. Raises: Refused."""

        def change(connection: sqlite3.Connection, new: Sequence[Row]) -> Written:
            (row,) = new
            if not catalog_tree.has_parent(connection, row):
                raise Refused("parent")
            query = "SELECT nbytes, node FROM chunks WHERE id = ?"
            held, node = connection.execute(query, (row.id,)).fetchone() or (0, 1)
            more = int(not row.node and node == 1)
            evicted, reason = self._room(connection, row.nbytes - _number(held), more, {row.id}, {row.parent})
            return Written([*evicted, *catalog_tree.replace_row(connection, row)], evicted, reason, row.id)

        return self._written([chunk], change)

    def split(self, node: Chunk, rest: Chunk) -> Written:
        """See `Parents`. Raises: Refused."""

        def change(connection: sqlite3.Connection, new: Sequence[Row]) -> Written:
            upper, lower = new
            held = connection.execute("SELECT nbytes FROM chunks WHERE id = ?", (lower.id,)).fetchone() or (0,)
            more = upper.nbytes + lower.nbytes - _number(held[0])
            stay = {lower.id, *catalog_tree.a_child(connection, lower)}
            evicted, reason = self._room(connection, more, 1 - upper.node, stay, {upper.parent})
            gone = catalog_tree.split_row(connection, upper, lower)
            if gone is None:
                raise Refused("changed")
            return Written([*evicted, *gone], evicted, reason, lower.id)

        return self._written([node, rest], change)

    def shrink(self) -> tuple[list[Removed], str]:
        """Meets a budget smaller than the folder's content. Raises: sqlite3.Error."""
        with self.catalog.transaction() as connection:
            return self._room(connection, 0, 0, (), ())

    def _room(
        self,
        connection: sqlite3.Connection,
        nbytes: int,
        entries: int,
        protected: Collection[str],
        keep: Collection[str],
    ) -> tuple[list[Removed], str]:
        try:
            return catalog_tree.make_room(
                connection,
                self.policy,
                self.budget,
                protected,
                nbytes=nbytes,
                entries=entries,
                keep=keep,
            )
        except catalog_tree.NoRoom as error:
            raise Refused("too_large") from error

    def _written(
        self, chunks: Sequence[Chunk], change: Callable[[sqlite3.Connection, Sequence[Row]], Written]
    ) -> Written:
        try:
            with ExitStack() as stack:
                new = [stack.enter_context(self._file(chunk)) for chunk in chunks]
                return self._commit(new, change)
        except Refused:
            raise
        except (StoreError, UnicodeError) as error:
            logger.warning("a chunk cannot be stored: %s", str(error))
            raise Refused("invalid") from error
        except OSError as error:
            raise Refused(files.reason_of(error)) from error
        except sqlite3.Error as error:
            raise Refused(sql.reason_of(error)) from error

    @contextmanager
    def _file(self, chunk: Chunk) -> Generator[_File]:
        """The chunk's file under its temporary name, and its row."""
        meta = stamped(chunk.meta, chunk.tensor)
        encoded, blob = encode(meta.id, chunk.tensor), encode_meta(meta)
        size = encoded.nbytes + len(blob)
        if self.budget.excess_bytes(size):
            raise Refused("too_large")
        name = names.new_chunk(meta.id)
        row = Row(
            meta.id, meta.partition, meta.epoch, blob, name, encoded.nbytes, encoded.checksum, size,
            meta.parent, int(meta.kind == NODE),
        )  # fmt: skip
        temporary = files.Entry(self.layout.temporary, names.temporary_of(name))
        with files.written(temporary, (encoded.header, encoded.data)):
            yield _File(row, encoded, temporary)

    def _commit(self, new: Sequence[_File], change: Callable[[sqlite3.Connection, Sequence[Row]], Written]) -> Written:
        uses = self.uses.take()
        try:
            with self.catalog.transaction() as connection:
                note(connection, uses)
                written = change(connection, [file.row for file in new])
                for file in new:
                    files.publish(file.temporary, self.layout.chunks, file.row.file)
                return written
        except BaseException:
            self.uses.put_back(uses)
            for file in new:
                if not self._may_be_listed(file.row):
                    files.remove_chunk(self.layout.chunks, file.row.file)
            raise

    def _may_be_listed(self, row: Row) -> bool:
        """Whether an interrupted commit took effect nevertheless. If unknown, the file is left to the next sweep."""
        try:
            found = self.catalog.row(row.id)
        except sqlite3.Error:
            return True
        return isinstance(found, Row) and found.file == row.file


def _number(value: object) -> int:
    """A size in a row, 0 for a damaged one."""
    return value if type(value) is int else 0

"""Ways to make a cache's folder hostile. Each changes the folder of a closed store with six chunks of two partitions."""

import contextlib
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dejakv.attack.canary import pickle_that_touches
from dejakv.attack.forging import MISTYPED, forged
from dejakv.store.names import CATALOG, CHUNKS, MARKER, TEMPORARY

HUGE = 1 << 40
NOBODY = 65534


@dataclass(frozen=True)
class Place:
    """A folder to change, a folder beside it that must stay as it is, and where an unpickled canary leaves its mark."""

    folder: Path
    rng: random.Random

    @property
    def outside(self) -> Path:
        return self.folder.parent / "outside"

    @property
    def outside_content(self) -> dict[str, bytes]:
        found = sorted(path for path in self.outside.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in found}

    @property
    def canary(self) -> Path:
        return self.folder.parent / "canary"

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / CHUNKS).rglob("*.safetensors"))

    @property
    def catalog(self) -> Path:
        return self.folder / CATALOG

    @property
    def pickle(self) -> bytes:
        return pickle_that_touches(self.canary)

    def sql(self, run: Callable[[sqlite3.Connection], object]) -> None:
        with contextlib.closing(sqlite3.connect(self.catalog)) as connection, connection:
            run(connection)


Trick = Callable[[Place], None]


def planted(place: Place) -> None:
    for name in ("a.pkl", "a.pt", "a.safetensors", "sitecustomize.py", "index.json", ".hidden"):
        for folder in (place.folder, place.folder / CHUNKS, place.folder / TEMPORARY, place.files[0].parent):
            (folder / name).write_bytes(place.pickle)


def pickles(place: Place) -> None:
    for file in place.files:
        file.write_bytes(place.pickle)


def pickled_catalog(place: Place) -> None:
    place.catalog.write_bytes(place.pickle)


def noise(place: Place) -> None:
    for file in (*place.files, place.catalog):
        file.write_bytes(place.rng.randbytes(file.stat().st_size))


def flipped(place: Place) -> None:
    for file in place.files:
        raw = bytearray(file.read_bytes())
        raw[place.rng.randrange(len(raw))] ^= 1 << place.rng.randrange(8)
        file.write_bytes(raw)


def cut(place: Place) -> None:
    for number, file in enumerate(place.files):
        os.truncate(file, (0, 1, 8, 100, file.stat().st_size - 1, file.stat().st_size // 2)[number % 6])


def cut_catalog(place: Place) -> None:
    os.truncate(place.catalog, place.catalog.stat().st_size // 2 + 7)


def exchanged(place: Place) -> None:
    """Every chunk's file has the content of the next one."""
    contents = [file.read_bytes() for file in place.files]
    for file, content in zip(place.files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)


def exchanged_rows(place: Place) -> None:
    """Every row of the catalog has the description of the next one."""
    _shift(place, "blob")


def exchanged_names(place: Place) -> None:
    """Every row names the file of the next one."""
    _shift(place, "text")


def _shift(place: Place, kind: str) -> None:
    def run(connection: sqlite3.Connection) -> None:
        for table in _tables(connection):
            for column in _columns(connection, table):
                rows = connection.execute(
                    f'SELECT rowid, "{column}" FROM "{table}" WHERE typeof("{column}") = ?', (kind,)
                )
                found = rows.fetchall()
                if kind == "text" and not any("/" in str(value) for _, value in found):
                    continue
                shifted = [value for _, value in found[1:] + found[:1]]
                for (row, _), value in zip(found, shifted, strict=True):
                    # A column that is unique stays as it is.
                    with contextlib.suppress(sqlite3.IntegrityError):
                        connection.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', (value, row))

    place.sql(run)


def outside_names(place: Place) -> None:
    """The rows name files outside of the folder."""
    (place.outside / "x.safetensors").write_bytes(place.files[0].read_bytes())
    names = ("../../outside/x.safetensors", "/etc/passwd", str(place.outside / "x.safetensors"), "a\0b", "")

    def run(connection: sqlite3.Connection) -> None:
        for table in _tables(connection):
            for column in _columns(connection, table):
                for number, (row, value) in enumerate(
                    connection.execute(f'SELECT rowid, "{column}" FROM "{table}"').fetchall()
                ):
                    if isinstance(value, str) and value.endswith(".safetensors"):
                        with contextlib.suppress(sqlite3.IntegrityError):
                            new = names[number % len(names)]
                            connection.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', (new, row))

    place.sql(run)


def links(place: Place) -> None:
    """Every chunk's file is a link to a good one outside."""
    for number, file in enumerate(place.files):
        shutil.move(file, place.outside / str(number))
        file.symlink_to(place.outside / str(number))


def linked_folder(place: Place) -> None:
    shutil.move(place.folder / CHUNKS, place.outside / CHUNKS)
    (place.folder / CHUNKS).symlink_to(place.outside / CHUNKS)


def linked_catalog(place: Place) -> None:
    shutil.move(place.catalog, place.outside / CATALOG)
    place.catalog.symlink_to(place.outside / CATALOG)


def pipes(place: Place) -> None:
    """Opening a pipe waits for its other end."""
    for file in place.files:
        file.unlink()
        os.mkfifo(file)


def piped_marker(place: Place) -> None:
    (place.folder / MARKER).unlink()
    os.mkfifo(place.folder / MARKER, 0o600)


def piped_catalog(place: Place) -> None:
    place.catalog.unlink()
    os.mkfifo(place.catalog, 0o600)


def devices(place: Place) -> None:
    for file in place.files:
        file.unlink()
        file.symlink_to("/dev/zero")


def endless(place: Place) -> None:
    """Files of a terabyte, all of it a hole."""
    for file in place.files:
        os.truncate(file, HUGE)


def large_headers(place: Place) -> None:
    """Headers that promise much, and headers that nest deeply."""
    for number, file in enumerate(place.files):
        body = b'{"state":' + b"[" * 60_000
        shape = b'{"state":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,4]}}'
        size, text = ((HUGE, b"x"), (len(body), body), (len(shape), shape))[number % 3]
        file.write_bytes(size.to_bytes(8, "little") + text + bytes(64))


def huge_marker(place: Place) -> None:
    (place.folder / MARKER).write_bytes(b"[" * (32 << 20))


def huge_rows(place: Place) -> None:
    """Descriptions of 16 MiB each."""

    def run(connection: sqlite3.Connection) -> None:
        for table in _tables(connection):
            for column in _columns(connection, table):
                connection.execute(
                    f'UPDATE "{table}" SET "{column}" = zeroblob(16777216) WHERE typeof("{column}") = \'blob\''
                )

    place.sql(run)


def forged_rows(place: Place) -> None:
    """Descriptions with a right checksum and fields of wrong types."""

    def run(connection: sqlite3.Connection) -> None:
        rows = connection.execute("SELECT rowid, meta FROM chunks").fetchall()
        for (row, blob), changes in zip(rows, place.rng.sample(MISTYPED, len(rows)), strict=True):
            connection.execute("UPDATE chunks SET meta = ? WHERE rowid = ?", (forged(blob, changes), row))

    place.sql(run)


def foreign_catalog(place: Place) -> None:
    place.catalog.unlink()
    place.sql(lambda connection: connection.execute("CREATE TABLE bookmarks (url TEXT)"))


def endless_views(place: Place) -> None:
    """Views in the tables' place that never end."""

    def run(connection: sqlite3.Connection) -> None:
        for table in _tables(connection):
            columns = ", ".join(f'x AS "{column}"' for column in _columns(connection, table))
            connection.execute(f'ALTER TABLE "{table}" RENAME TO "{table}_kept"')
            endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
            connection.execute(f'CREATE VIEW "{table}" AS {endless} SELECT {columns} FROM c')

    place.sql(run)


def triggers(place: Place) -> None:
    """Whatever is written deletes everything."""

    def run(connection: sqlite3.Connection) -> None:
        tables = _tables(connection)
        for table in tables:
            for event in ("INSERT", "UPDATE", "DELETE"):
                body = " ".join(f'DELETE FROM "{other}";' for other in tables)
                connection.execute(f'CREATE TRIGGER "{table}{event}" AFTER {event} ON "{table}" BEGIN {body} END')

    place.sql(run)


def log_of_noise(place: Place) -> None:
    for suffix in ("-wal", "-shm", "-journal"):
        Path(f"{place.catalog}{suffix}").write_bytes(place.rng.randbytes(100_000))


def open_to_all(place: Place) -> None:
    for path in (place.folder, *place.folder.rglob("*")):
        path.chmod(0o777)


def of_others(place: Place) -> None:
    """Needs root; without it the files stay ours."""
    if os.geteuid() == 0:
        for path in (*place.files, place.catalog):
            os.chown(path, NOBODY, NOBODY)


def _tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return [name for (name,) in rows.fetchall()]


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")').fetchall()]


TRICKS: Mapping[str, Trick] = {
    trick.__name__.replace("_", " "): trick
    for trick in (
        planted, pickles, pickled_catalog, noise, flipped, cut, cut_catalog, exchanged, exchanged_rows, exchanged_names,
        outside_names, links, linked_folder, linked_catalog, pipes, piped_marker, piped_catalog, devices, endless,
        large_headers, huge_marker, huge_rows, forged_rows, foreign_catalog, endless_views, triggers, log_of_noise, open_to_all, of_others,
    )
}  # fmt: skip

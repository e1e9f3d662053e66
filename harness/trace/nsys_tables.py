"""The tables of an Nsight Systems SQLite export as numpy arrays, whatever version wrote them, damaged or not.

Torch-free. Exports create tables and columns only where there is something to put in them, names are text or ids into
``StringIds``, and files get cut off. What cannot be read is left out and noted in ``notes``; only a file that is no
export at all is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from spikemark.harness.errors import UsageError

MISSING = np.iinfo(np.int64).min
"""Stands for NULL, and for anything that is no integer, in an integer column."""
CHUNK = 1 << 16
MAGIC = b"SQLite format 3\x00"

Array = np.ndarray[Any, np.dtype[Any]]


class Names:
    """Texts as codes 0, 1, ... in order of appearance."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        """The code of ``text``, new or known."""
        found = self._codes.setdefault(text, len(self.texts))
        if found == len(self.texts):
            self.texts.append(text)
        return found


class Tables:
    """An export opened for reading. Raises ``UsageError``, one line, if ``path`` is no SQLite database."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        self._strings: dict[int, str] | None = None
        self._check()
        try:
            self._connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            self._columns = {name: self._columns_of(name) for name in self._table_names()}
        except sqlite3.Error as error:
            raise UsageError(f"{self.path} is a SQLite database that is cut off or damaged ({error})") from None

    def _check(self) -> None:
        try:
            with self.path.open("rb") as file:
                head = file.read(len(MAGIC))
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror or error}") from None
        if not head:
            raise UsageError(f"{self.path} is empty: the export was not finished")
        if head != MAGIC:
            hint = ": export it first, `nsys export --type=sqlite FILE`" if self.path.suffix == ".nsys-rep" else ""
            raise UsageError(f"{self.path} is no SQLite database{hint}")

    def _table_names(self) -> list[str]:
        return [str(row[0]) for row in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]

    def _columns_of(self, table: str) -> list[str]:
        return [str(row[1]) for row in self._connection.execute(f"PRAGMA table_info({_quoted(table)})")]

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def has(self, table: str, *columns: str) -> bool:
        """Whether the export holds the table, with all these columns."""
        return table in self._columns and set(columns) <= set(self._columns[table])

    def integers(self, table: str, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Array]:
        """Columns as int64 arrays; ``MISSING`` where there is none. Rows without a ``required`` value are left out.

        Empty arrays if the table is absent, or (noted) if it lacks a required column. A table that is damaged half-way
        gives the rows before the damage (noted).
        """
        required, optional = list(required), list(optional)
        names = [*required, *optional]
        empty = {name: np.empty(0, np.int64) for name in names} | {"rowid": np.empty(0, np.int64)}
        if table not in self._columns:
            return empty
        absent = [name for name in required if name not in self._columns[table]]
        if absent:
            self.notes.append(f"table {table} lacks the column {absent[0]}: its rows are left out")
            return empty
        here = [name for name in names if name in self._columns[table]]
        columns = ", ".join(_integer(name) for name in here)
        chunks = [
            np.array(rows, np.int64) for rows in self._rows(table, f"SELECT rowid, {columns} FROM {_quoted(table)}")
        ]
        found = np.concatenate(chunks) if chunks else np.empty((0, len(here) + 1), np.int64)
        good = np.ones(len(found), bool)
        for name in required:
            good &= found[:, here.index(name) + 1] != MISSING
        if not good.all():
            self.notes.append(f"{int((~good).sum()):,} rows of {table} lack {' or '.join(required)}: left out")
            found = found[good]
        out = {name: np.ascontiguousarray(found[:, i + 1]) for i, name in enumerate(here)}
        rest = {name: np.full(len(found), MISSING) for name in optional if name not in here}
        return out | rest | {"rowid": np.ascontiguousarray(found[:, 0])}

    def values(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Rows ``(rowid, *columns)`` as Python values, None for a column that is absent; nothing if the table is."""
        if table not in self._columns:
            return
        chosen = ", ".join(_quoted(c) if c in self._columns[table] else "NULL" for c in columns)
        for rows in self._rows(table, f"SELECT rowid, {chosen} FROM {_quoted(table)}"):
            yield from rows

    def _rows(self, table: str, query: str) -> Iterator[list[tuple[Any, ...]]]:
        count = 0
        try:
            cursor = self._connection.execute(query)
            while rows := cursor.fetchmany(CHUNK):
                yield rows
                count += len(rows)
        except sqlite3.Error as error:
            self.notes.append(f"table {table} is damaged after {count:,} rows ({error}): the rest is missing")

    def text(self, value: Any) -> str:
        """A name that is text already, or an id into ``StringIds``; '' for none."""
        if isinstance(value, str):
            return value
        if value is None:
            return ""
        if self._strings is None:
            self._strings = {
                row[1]: str(row[2]) for row in self.values("StringIds", "id", "value") if row[2] is not None
            }
        return self._strings.get(value, f"(name {value} is not in the export)")

    def facts(self) -> dict[str, str]:
        """Who exported it, and how, by name; empty where the export does not say (the table was renamed once)."""
        tables = ("EXPORT_META_DATA", "META_DATA_EXPORT")
        return {str(row[1]): str(row[2]) for table in tables for row in self.values(table, "name", "value")}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _integer(column: str) -> str:
    """SQL for a column's integers: SQLite stores whatever it is given, whatever the column was declared as."""
    name = _quoted(column)
    return f"CASE WHEN typeof({name}) = 'integer' THEN {name} ELSE {MISSING} END"

"""Metrics rows by column: a thousand runs of 300 epochs are 13 million values, and a dict for each row has no room."""

import marshal
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

Column = Sequence[Any]


class Row(Mapping[str, Any]):
    """One row, read as a dict is."""

    __slots__ = ("_at", "_rows")

    def __init__(self, rows: "Rows", at: int) -> None:
        self._rows, self._at = rows, at

    def __getitem__(self, name: str) -> Any:
        if name not in self._rows.names[self._at]:
            raise KeyError(name)
        return self._rows.columns[name][self._at]

    def get(self, name: str, default: Any = None) -> Any:
        return self._rows.columns[name][self._at] if name in self._rows.names[self._at] else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.names[self._at])

    def __len__(self) -> int:
        return len(self._rows.names[self._at])


class Rows(Sequence[Row]):
    """Rows that cannot be changed.

    Args:
        columns: by name, one value per row; None where a row has none.
        names: the columns that each row has, in its order.
    """

    def __init__(self, columns: Mapping[str, Column], names: Sequence[Mapping[str, None]]) -> None:
        self.columns, self.names = columns, names

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "Rows":
        """Rows as they were read, or such already."""
        if isinstance(rows, cls):
            return rows
        kinds: dict[tuple[str, ...], dict[str, None]] = {}
        names = [kinds.setdefault(tuple(row), dict.fromkeys(row)) for row in rows]
        every = dict.fromkeys(name for kind in kinds.values() for name in kind)
        return cls({name: small([row.get(name) for row in rows]) for name in every}, names)

    def replaced(self, **columns: Sequence[Any]) -> "Rows":
        """The same rows with other values in columns that they have."""
        return Rows({**self.columns, **{name: small(values) for name, values in columns.items()}}, self.names)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        found = range(len(self))[at]
        return [Row(self, i) for i in found] if isinstance(found, range) else Row(self, found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(map(dict, self)) == list(map(dict, other))


class Packed(Sequence[Any]):
    """Lists and mappings as bytes, a tenth of what they take as objects; equal ones once."""

    def __init__(self, values: Sequence[Any]) -> None:
        different: dict[bytes, bytes] = {}
        self._values = [different.setdefault(packed, packed) for packed in map(marshal.dumps, values)]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        return marshal.loads(self._values[at])


def small(values: Sequence[Any]) -> Column:
    """The same values in as little memory as their kind allows."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return array("d", values)
    if kinds == {int} and max(map(abs, values)) < 2**63:
        return array("q", values)
    return Packed(values) if kinds & {dict, list} else list(values)

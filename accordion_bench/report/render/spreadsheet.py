"""table.csv: numbers are numbers, and no text is a formula to the program that opens it."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # with which a cell begins that a spreadsheet computes


def csv(tables: Sequence[pd.DataFrame]) -> str:
    """Tables below each other as CSV; an apostrophe stands before text that could be a formula."""
    table = pd.concat(tables)
    table.columns = [_shown(name) for name in table.columns]
    text = [name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name])]
    return str(table.assign(**{name: table[name].map(_shown) for name in text}).to_csv(index=False))


def _shown(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell

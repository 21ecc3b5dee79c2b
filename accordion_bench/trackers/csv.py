"""CSV tracker: one table of all metrics rows, for spreadsheets."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accordion_bench.options.option import Choice, with_options
from accordion_bench.runs import durable
from accordion_bench.runs.folder import RunFolder
from accordion_bench.trackers.tracker import Tracker, scalars

FILE = "metrics.csv"


@with_options
class CSV(Tracker):
    """Tracker that writes the numbers of every row to the run folder's `metrics.csv`; nested ones as `plan/batch_size`.

    A column that first occurs in a later row is appended at the right, and the file is rewritten.
    """

    chosen_as = {"csv": Choice("a table of all rows, metrics.csv in the run folder")}

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        self.folder, self.columns = folder, list[str]()
        self.rows = [scalars(row) for row in RunFolder(folder).read_metrics()]  # non-empty if the run is resumed
        if self.rows:
            self._write()

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(scalars(row))
        if self.rows[-1].keys() <= set(self.columns):
            with durable.room(self.folder):
                durable.append_line(self.folder / FILE, self._text(self.rows[-1:]).rstrip("\n"))
        else:
            self._write()

    def _write(self) -> None:
        self.columns = list(dict.fromkeys(name for row in self.rows for name in row))
        heading = {name: name for name in self.columns}
        with durable.room(self.folder):
            durable.write_text(self.folder / FILE, self._text([heading, *self.rows]))

    def _text(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, lineterminator="\n").writerows(rows)
        return text.getvalue()

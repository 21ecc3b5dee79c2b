"""Advice as files: the same numbers as text, CSV and JSON."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accordion_bench.advising.table import Advice, limit_in_words
from accordion_bench.options.checks import ValueRefused

FORMAT = 1  # of advice.json
TEXT, CSV, JSON = "advice.txt", "advice.csv", "advice.json"


def refuse_taken(out: Path) -> None:
    """Refuse a folder that holds advice already, or that cannot be made; leaves no new one behind.

    Raises:
        ValueRefused: with another folder.
    """
    if (out / JSON).exists():
        raise ValueRefused("--out", "a folder without advice in it", out, _free(out))
    try:
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        if new:
            out.rmdir()
    except OSError as error:
        raise ValueRefused(
            "--out", f"a folder that can be made ({error.strerror})", out, "results/advice_runs/new"
        ) from None


def write(advice: Advice, out: Path, timed_with: Mapping[str, Any], said: str) -> None:
    """Write the three files.

    Args:
        advice: with its verdict.
        out: a folder, made where there is none.
        timed_with: versions, device, cores, threads, commit: what a reader needs to time it again.
        said: the text.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / TEXT).write_text(said, encoding="utf-8")
    (out / CSV).write_text(as_csv(advice), encoding="utf-8")
    (out / JSON).write_text(as_json(advice, timed_with), encoding="utf-8")


def as_csv(advice: Advice) -> str:
    """One line for each method."""
    rows = [row.flat() for row in advice.rows]
    written = io.StringIO()
    table = csv.DictWriter(written, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue()


def as_json(advice: Advice, timed_with: Mapping[str, Any]) -> str:
    """Everything; its rows are those of the CSV."""
    told = {"format": FORMAT, **asdict(advice), "workers": advice.workers}
    told |= {
        "compute": advice.compute._asdict(),
        "rows": [row.flat() for row in advice.rows],
        "pays": advice.pays and {"below": limit_in_words(advice.pays.below) or advice.pays.below, "on": advice.pays.on},
        "timed_with": {**timed_with},
    }
    return json.dumps(told, indent=1, allow_nan=False) + "\n"


def _free(out: Path) -> Path:
    """The folder's name with the first number that is not taken."""
    count = 2
    while (other := out.with_name(f"{out.name}-{count}")).exists():
        count += 1
    return other

"""What is known of each method's accuracy, and the command that would measure it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accordion_bench.advising.table import Advice, Row
from accordion_bench.options.override import group_of, key_of


def with_accuracies(advice: Advice, known: Mapping[str, str], typed: Sequence[str]) -> Advice:
    """The advice with both columns filled.

    Args:
        advice: whose rows lack them.
        known: by method, from runs at hand; local methods without their period.
        typed: overrides that say what is trained; none where nobody knows, as with a timeline.
    """

    def told(row: Row) -> Row:
        name = row.method.partition(", H ")[0] if row.local else row.method
        return replace(row, accuracy="" if row.method == "dense" else known.get(name, ""), command=command(row, typed))

    return replace(advice, rows=tuple(map(told, advice.rows)))


def command(row: Row, typed: Sequence[str]) -> str:
    """A run of one method; "" where what is trained is not known."""
    if not typed:
        return ""
    period = [f"sync.period={row.period}"] if row.local and not row.every_local_step else []
    kept = [word for word in row.overrides if not word.startswith("sync.period=")]
    chosen = {word.partition("=")[0] for word in kept}
    trained = [word for word in typed if chosen.isdisjoint((key_of(word), group_of(word)))]
    return " ".join(["python -m accordion_bench", *map(shlex.quote, trained), *kept, *period])

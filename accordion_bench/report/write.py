"""The report's folder: table.csv, table.md, figures, and a README.md that says where they come from."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from accordion_bench.report import figures, words
from accordion_bench.report.arms import Arm, group, settings
from accordion_bench.report.load import Run
from accordion_bench.report.provenance import provenance
from accordion_bench.report.table import markdown, tidy


def write(runs: Sequence[Run], out: Path) -> str:
    """Write everything about some runs; returns the text for stdout.

    Args:
        runs: finished and unfinished ones.
        out: folder; made where missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("*.png"), *out.glob("*.pdf")]:
        if old.name.startswith(figures.NAMES):
            old.unlink()  # of another report: it would not belong to this table
    arms, repeats = group(runs)
    parts = settings(arms)
    text = "\n\n".join(filter(None, [*map(section, parts), notes(runs, repeats)])) + "\n"
    (out / "table.md").write_text(text)
    readme = [text.rstrip()]
    if arms:
        pd.concat(map(tidy, parts)).to_csv(out / "table.csv", index=False)
        for i, members in enumerate(parts):
            figures.draw_all(members, out, f"-{i + 1}" if len(parts) > 1 else "")
        readme += [f"![{png.stem}]({png.name})" for png in sorted(out.glob("comparison*.png"))]
        readme.append(provenance([run for arm in arms for run in arm.runs]))
    (out / "README.md").write_text("\n\n".join(readme) + "\n")
    return f"{text}\ntable and figures: {out}"


def section(arms: Sequence[Arm]) -> str:
    """Heading, table, verdicts and captions of one setting."""
    lists = ["\n".join(f"- {line}" for line in lines) for lines in (words.verdicts(arms), words.captions(arms))]
    return "\n\n".join(filter(None, [f"## {words.heading(arms[0])}", markdown(tidy(arms)), *lists]))


def notes(runs: Sequence[Run], repeats: Sequence[Run]) -> str:
    """What is in no mean, and why."""
    parts = []
    if unfinished := words.unfinished([run for run in runs if not run.finished]):
        parts.append("Unfinished, in no mean:\n\n" + "\n".join(f"- {line}" for line in unfinished))
    if repeats:
        lines = [f"- {run.path.name} ({run.label}, seed {run.seed})" for run in repeats]
        parts.append("Repeats of a seed, in no mean (the newest run counts):\n\n" + "\n".join(lines))
    return "\n\n".join(parts)

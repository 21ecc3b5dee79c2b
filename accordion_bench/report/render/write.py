"""The report's folder: tables, figures, one HTML page, and a README.md that says where they come from."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from accordion_bench.report.compare.arms import Arm, group, settings
from accordion_bench.report.compare.provenance import provenance
from accordion_bench.report.compare.target import beside_tables
from accordion_bench.report.compare.tidy import tidy
from accordion_bench.report.compare.verdicts import verdicts
from accordion_bench.report.read.load import Run
from accordion_bench.report.render import captions, figures, latex
from accordion_bench.report.render.draw import draw
from accordion_bench.report.render.page import Section, page
from accordion_bench.report.render.table import aligned, cells, markdown

FORMATS = ("md", "csv", "latex", "html")
TABLES = ("table.md", "table.csv", "table.tex", "report.html")


def write(
    runs: Sequence[Run],
    out: Path,
    folders: Sequence[tuple[str, str]] = (),
    formats: Sequence[str] = FORMATS,
    bandwidths: Sequence[float] = figures.BANDWIDTHS,
    pdf: bool = False,
) -> str:
    """Write everything about some runs; returns the text for stdout.

    Args:
        runs: finished and unfinished ones.
        out: folder; made where missing.
        folders: names of those without a run, and why; see `missing_runs.no_runs`.
        formats: some of md (table.md, README.md), csv, latex (table.tex) and html (report.html); figures always.
        bandwidths: bit/s of the links in figures of modelled time.
        pdf: a PDF of every figure beside its PNG.
    """
    out.mkdir(parents=True, exist_ok=True)
    arms, repeats = group(runs)
    parts, absent = settings(arms), left_out(runs, repeats, folders)
    sections = [Section(*pair) for pair in zip(parts, draw(parts, out, bandwidths, pdf), strict=True)]
    across = figures.draw_across(parts, out, pdf)
    text = "\n\n".join([*map(section, parts), *notes(absent)]) + "\n"
    if "md" in formats:
        (out / "table.md").write_text(text)
        (out / "README.md").write_text(readme(text, sections, across))
    if "csv" in formats and parts:
        pd.concat(map(tidy, parts)).to_csv(out / "table.csv", index=False)
    if "latex" in formats and parts:
        (out / "table.tex").write_text("\n\n".join(map(tex, parts, range(1, len(parts) + 1))) + "\n")
    if "html" in formats:
        (out / "report.html").write_text(page(sections, across, absent))
    return f"{text}\ntables and figures: {out}"


def section(arms: Sequence[Arm]) -> str:
    """Heading, table, verdicts and captions of one setting, as Markdown."""
    lists = ["\n".join(f"- {line}" for line in lines) for lines in (verdicts(arms), captions.captions(arms))]
    beside = [f"### {heading}\n\n{aligned(cells)}\n\n- {note}" for heading, cells, note in beside_tables(arms)]
    return "\n\n".join(filter(None, [f"## {captions.heading(arms[0])}", markdown(tidy(arms)), *lists, *beside]))


def tex(arms: Sequence[Arm], number: int) -> str:
    """The table of one setting as papers print it, as LaTeX."""
    caption = " ".join([f"{captions.heading(arms[0])}.", *captions.captions(arms, paper=True)])
    return latex.table(cells(tidy(arms), paper=True), caption, f"accordion-bench-{number}")


def left_out(
    runs: Sequence[Run], repeats: Sequence[Run], folders: Sequence[tuple[str, str]]
) -> dict[str, Sequence[str]]:
    """Heading -> lines, for what is in no mean."""
    found = {
        "Unfinished, in no mean": captions.unfinished([run for run in runs if not run.finished]),
        "Repeats of a seed, in no mean (the newest run counts)": captions.repeated(repeats),
        "Skipped: no run in it": captions.skipped(folders),
    }
    return {heading: lines for heading, lines in found.items() if lines}


def notes(absent: dict[str, Sequence[str]]) -> list[str]:
    """What is in no mean, as Markdown."""
    return [f"{heading}:\n\n" + "\n".join(f"- {line}" for line in lines) for heading, lines in absent.items()]


def readme(text: str, sections: Sequence[Section], across: Sequence[Path]) -> str:
    """The tables, the figures that compare arms, and where they come from."""
    parts = [text.rstrip()]
    if sections:
        pngs = [png for section in sections for png in section.figures if png.name.startswith("comparison")]
        parts += [f"![{png.stem}]({png.name})" for png in (*pngs, *across)]
        parts.append(provenance([run for section in sections for arm in section.arms for run in arm.runs]))
    return "\n\n".join(parts) + "\n"

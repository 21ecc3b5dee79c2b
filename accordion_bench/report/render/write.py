"""The report's folder: tables, figures, one HTML page, and a README.md that says where they come from."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accordion_bench.report.compare.answer import answers
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.markdown import folded, inline, line
from accordion_bench.report.compare.provenance import provenance
from accordion_bench.report.compare.target import beside_tables
from accordion_bench.report.compare.tidy import tidy
from accordion_bench.report.compare.verdicts import verdicts
from accordion_bench.report.read.load import Run
from accordion_bench.report.read.printable import printable
from accordion_bench.report.render import captions, figures, latex
from accordion_bench.report.render.absent import left_out, notes
from accordion_bench.report.render.draw import draw
from accordion_bench.report.render.formats import FORMATS, Print
from accordion_bench.report.render.page import FAILED, INTERACTIVE, Section, missing, page
from accordion_bench.report.render.publish import replacing
from accordion_bench.report.render.sound import sound
from accordion_bench.report.render.spreadsheet import csv
from accordion_bench.report.render.table import aligned, cells, markdown

FIRST = "comparison"  # the figure that README.md shows
OF_LINKS = "accuracy_modelled"  # the figure that has the bandwidths
TABLES = ("table.md", "table.csv", "table.tex", "report.html")


class Written(NamedTuple):
    """A report that has been written.

    text: all of it but the figures, as Markdown.
    where: what has been written where.
    parts: the arms of each setting.
    absent: heading -> lines, for what is in no mean.
    """

    text: str
    where: str
    parts: Sequence[Sequence[Arm]]
    absent: dict[str, Sequence[str]]


def write(
    runs: Sequence[Run],
    out: Path,
    folders: Sequence[tuple[str, str]] = (),
    formats: Sequence[str] = FORMATS,
    bandwidths: Sequence[float] = figures.BANDWIDTHS,
    printed: Print = figures.AS_PNG,
    every: bool = True,
) -> Written:
    """Write everything about some runs.

    Args:
        runs: finished and unfinished ones.
        out: folder; made where missing.
        folders: names of those without a run, and why; see `missing_runs.no_runs`.
        formats: some of md (table.md, README.md), csv, latex (table.tex) and html (report.html); figures always.
        bandwidths: bit/s of the links in figures of modelled time.
        printed: how figures are.
        every: also the figures that the page draws itself, as files; that of bandwidths of one's own always is one.

    Raises:
        OSError: the folder takes no files; the report that was there is as it was.
    """
    runs, parts, repeats, (said, latex_texts) = sound(runs, texts)
    absent = left_out(runs, repeats, folders)
    without_page = missing() if "html" in formats else ""
    names = names_of(every or "html" not in formats or bool(without_page), tuple(bandwidths) != figures.BANDWIDTHS)
    with replacing(out) as new:
        drawn = draw(parts, new, names, bandwidths, printed)
        across, failed = _across(parts, new, printed)
        sections = [Section(arms, found.figures) for arms, found in zip(parts, drawn, strict=True)]
        if failed := [why for found in drawn for why in found.failed] + failed:
            absent = {**absent, FAILED: failed}
        text = "\n\n".join([*said, *notes(absent)]) + "\n"
        if "md" in formats:
            _write(new / "table.md", text)
            _write(new / "README.md", readme(text, sections, across))
        if "csv" in formats and parts:
            _write(new / "table.csv", csv(list(map(tidy, parts))))
        if "latex" in formats and parts:
            _write(new / "table.tex", "\n\n".join(latex_texts) + "\n")
        if "html" in formats and not without_page:
            _write(new / "report.html", page(sections, across, absent))
    where = f"tables and figures: {printable(str(out), longest=4096)}"
    return Written(text, "\n".join(filter(None, [where, without_page])), parts, absent)


def names_of(every: bool, links: bool = False) -> list[str]:
    """The figures of a setting that are drawn as files.

    Args:
        every: also those that the page draws itself.
        links: also the one of modelled time on several links.
    """
    files = {FIRST, OF_LINKS} if links else {FIRST}
    return [name for name in figures.OF_A_SETTING if every or name in files or name not in INTERACTIVE]


def texts(parts: Sequence[Sequence[Arm]]) -> tuple[list[str], list[str]]:
    """The answers and each setting as Markdown, and as LaTeX; with all else that looks at every run."""
    for arms in parts:
        provenance([run for arm in arms for run in arm.runs])
    return [*answered(parts), *map(section, parts)], list(map(tex, parts, range(1, len(parts) + 1)))


def _across(parts: Sequence[Sequence[Arm]], out: Path, printed: Print) -> tuple[list[Path], list[str]]:
    """The figures that compare settings, and a sentence where they cannot be drawn."""
    try:
        return figures.draw_across(parts, out, printed), []
    except OSError:  # the disk is full, say
        raise
    except Exception as error:
        return [], [printable(f"workers: {type(error).__name__}: {error}", longest=500)]


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def answered(parts: Sequence[Sequence[Arm]]) -> list[str]:
    """The answer of each setting as Markdown, a paragraph each; with the setting's name where there are several."""
    named = [f"**{inline(captions.heading(arms[0]))}.** " if len(parts) > 1 else "" for arms in parts]
    return [f"{name}{line(' '.join(answers(arms)))}" for name, arms in zip(named, parts, strict=True)]


def section(arms: Sequence[Arm]) -> str:
    """Heading, table, verdicts and captions of one setting, as Markdown."""
    lists = ["\n".join(f"- {line(said)}" for said in lines) for lines in (verdicts(arms), captions.captions(arms))]
    beside = [
        f"### {inline(heading)}\n\n{aligned(cells)}\n\n- {line(note)}" for heading, cells, note in beside_tables(arms)
    ]
    heading = f"## {inline(captions.heading(arms[0]))}"
    return "\n\n".join(filter(None, [heading, markdown(tidy(arms)), *lists, *beside]))


def tex(arms: Sequence[Arm], number: int) -> str:
    """The table of one setting as papers print it, as LaTeX."""
    caption = " ".join([f"{captions.heading(arms[0])}.", *captions.captions(arms, paper=True)])
    return latex.table(cells(tidy(arms), paper=True), caption, f"accordion-bench-{number}")


def readme(text: str, sections: Sequence[Section], across: Sequence[Path]) -> str:
    """The tables, the figures that compare arms, and where they come from."""
    parts = [text.rstrip()]
    if sections:
        pngs = [png for section in sections for png in section.figures if png.name.startswith(FIRST)]
        parts += [f"![{png.stem}]({png.name})" for png in (*pngs, *across)]
        parts.append(provenance([run for section in sections for arm in section.arms for run in arm.runs]))
    return folded("\n\n".join(parts)) + "\n"

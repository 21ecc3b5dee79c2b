"""Writing of a report's folder: tables, figures, one HTML page, and a README.md with their provenance.

A report is replaced as a whole: until its last file is written, the old one is unchanged. A run with unexpected content
is left out and named, so that it does not break the report.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from accordion_bench.report import AS_PNG, BANDWIDTHS, FORMATS, Print
from accordion_bench.report.compare.arms import Arm, own_commands
from accordion_bench.report.compare.beside import beside_tables
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.compare.intervals import first
from accordion_bench.report.compare.verdicts import answers, verdicts
from accordion_bench.report.read import Run
from accordion_bench.report.render import captions, figures
from accordion_bench.report.render.page import FAILED, Section, missing, page
from accordion_bench.report.render.tables import aligned, cells, csv, folded, inline, latex, line, markdown
from accordion_bench.runs import durable
from accordion_bench.runs.untrusted import printable

INDEX = ("report.html", "README.md")  # replaced last, in this order, because they refer to the other files
PREFIX = ".report-"
DAY = 86400  # seconds after which an unfinished report is abandoned


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Provide a temporary folder inside `out`, created if missing; on exit, its files replace those of the old report.

    Each file is synced and renamed, so there is never a partial file. Files that the new report does not have stay.

    Raises:
        OSError: the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(out)
    new = Path(tempfile.mkdtemp(prefix=PREFIX, dir=out))
    try:
        yield new
        files = sorted(new.iterdir(), key=lambda file: (_rank(file), file.name))
        for file in files:
            durable.sync(file)
        for file in files:
            os.replace(file, out / file.name)
        durable.sync(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _rank(file: Path) -> int:
    return INDEX.index(file.name) + 1 if file.name in INDEX else 0


def _remove_left_behind(out: Path) -> None:
    for folder in out.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > DAY:
                shutil.rmtree(folder, ignore_errors=True)


def left_out(
    runs: Sequence[Run], repeats: Sequence[Run], folders: Sequence[tuple[str, str]]
) -> dict[str, Sequence[str]]:
    """Return runs and folders that enter no mean: heading -> lines.

    Args:
        runs: finished and unfinished runs.
        repeats: runs that repeat a seed; see `grouping.group`.
        folders: folders without a run, with the reason; see `read.no_runs`.
    """
    found = {
        "Unfinished, in no mean": [unfinished(run) for run in runs if not run.finished],
        "Repeats of a seed, in no mean (the newest run counts)": [
            f"{run.name} ({run.label}, seed {run.seed})" for run in repeats
        ],
        "Skipped: no run in it": skipped(folders),
    }
    return {heading: lines for heading, lines in found.items() if lines}


def unfinished(run: Run) -> str:
    """Return the line of a run that enters no mean."""
    epochs = run.config.get("epochs", "?")
    done = 0 if run.last_epoch is None else run.last_epoch + 1
    last = f"epoch {done} of {epochs} was the last" if done else f"no epoch of {epochs} was finished"
    return f"{run.name} ({run.label}, seed {run.seed}): {run.problem}; {last}"


def notes(absent: dict[str, Sequence[str]]) -> list[str]:
    """Return the runs that are left out, as Markdown."""
    return [f"{heading}:\n\n{_listed(first(lines))}" for heading, lines in absent.items()]


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line(said)}" for said in lines)


def skipped(folders: Sequence[tuple[str, str]]) -> list[str]:
    """Return one line for each folder or cell without a run."""
    return [f"{name}: {why}" for name, why in folders]


T = TypeVar("T")
Parts = list[list[Arm]]


def group_sound_runs(runs: Sequence[Run], say: Callable[[Parts], T]) -> tuple[list[Run], Parts, list[Run], T]:
    """Group the runs by setting and create the texts about them; runs that fail become unfinished.

    Args:
        runs: finished and unfinished runs.
        say: creates the texts of all settings; raises on a run with invalid content.

    Returns:
        all runs, the failing ones with the error as their problem; the arms of each setting; the runs that repeat a
            seed of their arm; the result of `say`.
    """
    try:
        return _compared(runs, say)
    except Exception:  # the failing run is determined below
        alone = [_unless_strange(run, [], say) for run in runs]
    try:
        return _compared(alone, say)
    except Exception:  # runs that fail only together: each must succeed with those before it
        kept: list[Run] = []
        for run in alone:
            kept.append(_unless_strange(run, kept, say))
        return _compared(kept, say)


def _compared(runs: Sequence[Run], say: Callable[[Parts], T]) -> tuple[list[Run], Parts, list[Run], T]:
    arms, repeats = group(runs)
    parts = settings(arms)
    return list(runs), parts, repeats, say(parts)


def _unless_strange(run: Run, beside: Sequence[Run], say: Callable[[Parts], T]) -> Run:
    """Return the run; marked unfinished if it cannot be compared alone or with others."""
    try:
        if run.finished:
            _compared([*beside, run], say)
    except Exception as error:
        return replace(run, problem=printable(f"cannot be compared ({type(error).__name__}: {error})", longest=500))
    return run


FIRST = "comparison"  # the figure in README.md
OF_LINKS = "accuracy_modelled"  # the figure that uses the bandwidths


class Written(NamedTuple):
    """Result of writing a report.

    text: its content without figures, as Markdown.
    where: description of the written files.
    parts: arms of each setting.
    absent: heading -> lines, for runs that enter no mean.
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
    printed: Print = AS_PNG,
    every: bool = True,
) -> Written:
    """Write the whole report about some runs.

    Args:
        runs: finished and unfinished runs.
        out: folder; created if missing.
        folders: names of folders without a run, with the reason; see `read.no_runs`.
        formats: some of md (table.md, README.md), csv, latex (table.tex) and html (report.html); figures always.
        printed: output settings of figures.
        every: also write figures that the page draws itself; the one with user-defined bandwidths is always written.

    Raises:
        OSError: the folder cannot be written; an existing report is unchanged.
    """
    runs, parts, repeats, (said, latex_texts) = group_sound_runs(runs, texts)
    absent = left_out(runs, repeats, folders)
    without_page = missing() if "html" in formats else ""
    names = names_of(every or "html" not in formats or bool(without_page), printed.bandwidths != BANDWIDTHS)
    with replacing(out) as new:
        drawn = figures.draw(parts, new, names, printed)
        across, failed = _across(parts, new, printed)
        sections = [Section(arms, found.figures) for arms, found in zip(parts, drawn, strict=True)]
        if failed := [why for found in drawn for why in found.failed] + failed:
            absent = {**absent, FAILED: failed}
        text = "\n\n".join([*said, *notes(absent)]) + "\n"
        files: dict[str, str] = {}
        if "md" in formats:
            files |= {"table.md": text, "README.md": readme(text, sections, across)}
        if "csv" in formats and parts:
            files["table.csv"] = csv(list(map(tidy, parts)))
        if "latex" in formats and parts:
            files["table.tex"] = "\n\n".join(latex_texts) + "\n"
        if "html" in formats and not without_page:
            files["report.html"] = page(sections, across, absent)
        for name, written in files.items():
            _write(new / name, written)
    where = f"tables and figures: {printable(str(out), longest=4096)}"
    return Written(text, "\n".join(filter(None, [where, without_page])), parts, absent)


def names_of(every: bool, links: bool = False) -> list[str]:
    """Return the figures of a setting to write as files: with `every`, also those that the page draws itself.

    With `links`, the figure of modelled time on several links is included.
    """
    files = {FIRST, OF_LINKS} if links else {FIRST}
    return [name for name in figures.OF_A_SETTING if every or name in files or name not in figures.INTERACTIVE]


def texts(parts: Sequence[Sequence[Arm]]) -> tuple[list[str], list[str]]:
    """Return answers and settings as Markdown, and as LaTeX. All code that reads every run is called here."""
    for arms in parts:
        provenance([run for arm in arms for run in arm.runs])
    return [*answered(parts), *map(section, parts)], list(map(tex, parts, range(1, len(parts) + 1)))


def _across(parts: Sequence[Sequence[Arm]], out: Path, printed: Print) -> tuple[list[Path], list[str]]:
    """Draw the figures that compare settings; return them, and a sentence if that failed."""
    try:
        return figures.draw_across(parts, out, printed), []
    except OSError:  # for instance, the disk is full
        raise
    except Exception as error:
        return [], [printable(f"workers: {type(error).__name__}: {error}", longest=500)]


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def answered(parts: Sequence[Sequence[Arm]]) -> list[str]:
    """Return the answer of each setting as a Markdown paragraph; with the setting's name if there are several."""
    named = [f"**{inline(captions.heading(arms[0]))}.** " if len(parts) > 1 else "" for arms in parts]
    return [f"{name}{line(' '.join(answers(arms)))}" for name, arms in zip(named, parts, strict=True)]


def section(arms: Sequence[Arm]) -> str:
    """Return heading, table, verdicts and captions of one setting, as Markdown."""
    lists = [_listed(verdicts(arms)), _listed(captions.captions(arms))]
    beside = [
        f"### {inline(heading)}\n\n{aligned(cells)}\n\n- {line(note)}" for heading, cells, note in beside_tables(arms)
    ]
    heading = f"## {inline(captions.heading(arms[0]))}"
    return "\n\n".join(filter(None, [heading, markdown(tidy(arms)), *lists, *beside]))


def tex(arms: Sequence[Arm], number: int) -> str:
    """Return the table of one setting in the form of papers, as LaTeX."""
    caption = " ".join([f"{captions.heading(arms[0])}.", *captions.captions(arms, paper=True)])
    return latex(cells(tidy(arms), paper=True), caption, f"accordion-bench-{number}")


def provenance(runs: Sequence[Run], commands: Sequence[str] = ()) -> str:
    """Return `commands`, or by default the runs' own, and commit, hardware and versions of runs, as Markdown."""
    lines = [
        "## Where this comes from\n",
        *(f"- {key}: {inline(value)}" for key, value in captions.facts(runs).items()),
        f"- reported on {time.strftime('%Y-%m-%d', time.gmtime())}\n",
        "```",
        *(commands or own_commands(runs)),
        "```",
    ]
    return "\n".join(lines)


def readme(text: str, sections: Sequence[Section], across: Sequence[Path]) -> str:
    """Return README.md: tables, figures that compare arms, and provenance of the runs."""
    parts = [text.rstrip()]
    if sections:
        pngs = [png for section in sections for png in section.figures if png.name.startswith(FIRST)]
        parts += [f"![{png.stem}]({png.name})" for png in (*pngs, *across)]
        parts.append(provenance([run for section in sections for arm in section.arms for run in arm.runs]))
    return folded("\n\n".join(parts)) + "\n"

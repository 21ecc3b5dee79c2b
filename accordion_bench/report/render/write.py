"""The report's folder: tables, figures, one HTML page, and a README.md that says where they come from.

A report appears as a whole, or not at all: whatever happens before its last file, the old one stays as it is. A run
whose files were not foreseen is left out, and told, instead of ending the report.
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
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.beside import beside_tables
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.compare.provenance import facts, own_commands
from accordion_bench.report.compare.show import first
from accordion_bench.report.compare.verdicts import answers, verdicts
from accordion_bench.report.read.load import Run
from accordion_bench.report.render import captions, figures
from accordion_bench.report.render.page import FAILED, Section, missing, page
from accordion_bench.report.render.tables import aligned, cells, csv, folded, inline, latex, line, markdown
from accordion_bench.runs import durable
from accordion_bench.runs.untrusted import printable

INDEX = ("report.html", "README.md")  # replaced last, in this order: they say what the other files are
PREFIX = ".report-"
DAY = 86400  # seconds, after which no report is still being written


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder inside of `out` for a new report, whose files then take the place of those of the old one.

    Each is synced and renamed, so that there is never a torn one. Files that the new report does not have stay.

    Args:
        out: folder of reports; made where missing.

    Raises:
        OSError: it takes no files.
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
    """Remove the unfinished reports of processes that were killed."""
    for folder in out.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > DAY:
                shutil.rmtree(folder, ignore_errors=True)


def left_out(
    runs: Sequence[Run], repeats: Sequence[Run], folders: Sequence[tuple[str, str]]
) -> dict[str, Sequence[str]]:
    """Runs and folders that are in no mean: heading -> lines.

    Args:
        runs: finished and unfinished ones.
        repeats: of seeds; see `grouping.group`.
        folders: those without a run, and why; see `load.no_runs`.
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
    """The line of a run that is in no mean."""
    epochs = run.config.get("epochs", "?")
    done = 0 if run.last_epoch is None else run.last_epoch + 1
    last = f"epoch {done} of {epochs} was the last" if done else f"no epoch of {epochs} was finished"
    return f"{run.name} ({run.label}, seed {run.seed}): {run.problem}; {last}"


def notes(absent: dict[str, Sequence[str]]) -> list[str]:
    """What is left out, as Markdown."""
    return [f"{heading}:\n\n{_listed(first(lines))}" for heading, lines in absent.items()]


def _listed(lines: Sequence[str]) -> str:
    """Lines as a list in Markdown."""
    return "\n".join(f"- {line(said)}" for said in lines)


def skipped(folders: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each folder or cell without a run."""
    return [f"{name}: {why}" for name, why in folders]


T = TypeVar("T")
Parts = list[list[Arm]]


def sound(runs: Sequence[Run], say: Callable[[Parts], T]) -> tuple[list[Run], Parts, list[Run], T]:
    """The runs by setting, and the texts about them.

    Args:
        runs: finished and unfinished ones.
        say: makes the texts of all settings; raises where a run is too strange for it.

    Returns:
        all runs, those that are too strange with this as their problem; the arms of each setting; the runs that repeat
        a seed of their arm; what `say` has returned.
    """
    try:
        return _compared(runs, say)
    except Exception:  # of which of them is found out below
        alone = [_unless_strange(run, [], say) for run in runs]
    try:
        return _compared(alone, say)
    except Exception:  # of several that do not go together: each must go with those before it
        kept: list[Run] = []
        for run in alone:
            kept.append(_unless_strange(run, kept, say))
        return _compared(kept, say)


def _compared(runs: Sequence[Run], say: Callable[[Parts], T]) -> tuple[list[Run], Parts, list[Run], T]:
    arms, repeats = group(runs)
    parts = settings(arms)
    return list(runs), parts, repeats, say(parts)


def _unless_strange(run: Run, beside: Sequence[Run], say: Callable[[Parts], T]) -> Run:
    """The run; unfinished where it cannot be compared with others, or by itself."""
    try:
        if run.finished:
            _compared([*beside, run], say)
    except Exception as error:
        return replace(run, problem=printable(f"cannot be compared ({type(error).__name__}: {error})", longest=500))
    return run


FIRST = "comparison"  # the figure that README.md shows
OF_LINKS = "accuracy_modelled"  # the figure that has the bandwidths


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
    printed: Print = AS_PNG,
    every: bool = True,
) -> Written:
    """Write everything about some runs.

    Args:
        runs: finished and unfinished ones.
        out: folder; made where missing.
        folders: names of those without a run, and why; see `load.no_runs`.
        formats: some of md (table.md, README.md), csv, latex (table.tex) and html (report.html); figures always.
        printed: how figures are.
        every: also the figures that the page draws itself, as files; that of bandwidths of one's own always is one.

    Raises:
        OSError: the folder takes no files; the report that was there is as it was.
    """
    runs, parts, repeats, (said, latex_texts) = sound(runs, texts)
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
    """The figures of a setting that are drawn as files.

    Args:
        every: also those that the page draws itself.
        links: also the one of modelled time on several links.
    """
    files = {FIRST, OF_LINKS} if links else {FIRST}
    return [name for name in figures.OF_A_SETTING if every or name in files or name not in figures.INTERACTIVE]


def texts(parts: Sequence[Sequence[Arm]]) -> tuple[list[str], list[str]]:
    """The answers and each setting as Markdown, and as LaTeX. Everything that reads every run is tried here."""
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
    lists = [_listed(verdicts(arms)), _listed(captions.captions(arms))]
    beside = [
        f"### {inline(heading)}\n\n{aligned(cells)}\n\n- {line(note)}" for heading, cells, note in beside_tables(arms)
    ]
    heading = f"## {inline(captions.heading(arms[0]))}"
    return "\n\n".join(filter(None, [heading, markdown(tidy(arms)), *lists, *beside]))


def tex(arms: Sequence[Arm], number: int) -> str:
    """The table of one setting as papers print it, as LaTeX."""
    caption = " ".join([f"{captions.heading(arms[0])}.", *captions.captions(arms, paper=True)])
    return latex(cells(tidy(arms), paper=True), caption, f"accordion-bench-{number}")


def provenance(runs: Sequence[Run], commands: Sequence[str] = ()) -> str:
    """Commands, commit, hardware and versions of some runs, as Markdown.

    Args:
        runs: whose.
        commands: that say the same as the runs' own in fewer lines.
    """
    lines = [
        "## Where this comes from\n",
        *(f"- {key}: {inline(value)}" for key, value in facts(runs).items()),
        f"- reported on {time.strftime('%Y-%m-%d', time.gmtime())}\n",
        "```",
        *(commands or own_commands(runs)),
        "```",
    ]
    return "\n".join(lines)


def readme(text: str, sections: Sequence[Section], across: Sequence[Path]) -> str:
    """README.md: the tables, the figures that compare arms, and the origin of the runs."""
    parts = [text.rstrip()]
    if sections:
        pngs = [png for section in sections for png in section.figures if png.name.startswith(FIRST)]
        parts += [f"![{png.stem}]({png.name})" for png in (*pngs, *across)]
        parts.append(provenance([run for section in sections for arm in section.arms for run in arm.runs]))
    return folded("\n\n".join(parts)) + "\n"

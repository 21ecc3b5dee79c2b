"""The report as one HTML page: tables, verdicts, figures and provenance in a file that loads nothing else."""

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from accordion_bench.options.units import counted
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.provenance import facts, own_commands
from accordion_bench.report.compare.target import beside_tables
from accordion_bench.report.compare.tidy import tidy
from accordion_bench.report.compare.verdicts import verdicts
from accordion_bench.report.read.load import Run
from accordion_bench.report.render import captions
from accordion_bench.report.render.table import cells
from accordion_bench.runs.metrics import metric

# of the page itself: a browser that honours it loads nothing from outside the file, whatever is in a label
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --soft: #595959; --line: #c9c9c9; --wash: #f3f3f3;
  --link: #0b57a4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #161616; --soft: #b0b0b0; --line: #4a4a4a; --wash: #232323; --link: #8fc1ff; } }
body { font: 1rem/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 110rem;
  margin: 0 auto; padding: 1rem 1.25rem 4rem; }
p, ul, dl { max-width: 62rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 3rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
a { color: var(--link); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
th, td { padding: .35rem .55rem; text-align: right; vertical-align: top; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; white-space: normal; min-width: 4rem; }
thead th:nth-child(2) { min-width: 0; }
tbody tr { border-bottom: 1px solid var(--line); }
tbody th { font-weight: 600; white-space: normal; min-width: 11rem; }
.beside { display: block; color: var(--soft); font-size: .85em; }
.notes { color: var(--soft); font-size: .9rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; margin: 1.5rem 0; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .9rem; width: 0; min-width: 100%; }
img { display: block; max-width: 100%; height: auto; background: #ffffff; border-radius: 4px; }
pre { overflow-x: auto; background: var(--wash); padding: .7rem; font-size: .85rem; border-radius: 4px; }
summary { cursor: pointer; margin-top: .6rem; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Section:
    """One setting.

    Args:
        arms: of it.
        figures: PNG files, drawn of these arms.
        running: runs of the setting that go on, each as an arm: curves, and in no table.
    """

    arms: Sequence[Arm]
    figures: Sequence[Path]
    running: Sequence[Arm] = ()

    @property
    def heading(self) -> str:
        """What is trained."""
        return captions.heading((*self.arms, *self.running)[0])


def page(
    sections: Sequence[Section], across: Sequence[Path], absent: dict[str, Sequence[str]], follow: str = ""
) -> str:
    """The whole page.

    Args:
        sections: one per setting.
        across: PNG files of figures that compare settings.
        absent: heading -> lines, for what is in no mean.
        follow: the script of a page that follows its runs, see `serve`; "" = a page that stays as it is.
    """
    runs = [run for section in sections for arm in section.arms for run in arm.runs]
    count = sum(len(section.arms) for section in sections)
    title = f"accordion_bench: {counted(len(runs), 'run')} in {counted(count, 'arm')}"
    entries = [(f"setting-{i}", s.heading) for i, s in enumerate(sections, 1)]
    entries += [("across", "Across settings")] if across else []
    entries += [(f"absent-{i}", heading) for i, heading in enumerate(absent, 1)]
    entries += [("provenance", "Where this comes from")] if runs else []
    contents = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in entries)
    left_out = sum(map(len, absent.values()))
    body = [
        f"<header><h1>{escape(title)}</h1>",
        f"<p>{counted(len(sections), 'setting')}; arms are compared within a setting only. "
        f"{counted(left_out, 'folder')} in no mean. "
        f"Reported on {time.strftime('%Y-%m-%d', time.gmtime())}.</p></header>",
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav>',
        "<main>",
        *(_setting(f"setting-{i}", section) for i, section in enumerate(sections, 1)),
        *([_section("across", "Across settings", _figures(across, "all settings"))] if across else []),
        *(_section(f"absent-{i}", heading, _list(lines)) for i, (heading, lines) in enumerate(absent.items(), 1)),
        *([_provenance(runs)] if runs else []),
        "</main>",
        *([f"<script>{follow}</script>"] if follow else []),
    ]
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy(follow)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body, "</body>", "</html>"]
    return "\n".join(lines) + "\n"


def policy(follow: str) -> str:
    """What a browser that honours it lets the page do."""
    if not follow:
        return POLICY
    digest = base64.b64encode(hashlib.sha256(follow.encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'; connect-src 'self'"


def _setting(name: str, section: Section) -> str:
    arms, heading = section.arms, section.heading
    if not arms:
        return _section(name, heading, f"<p>No run has finished yet.</p>{_figures(section.figures, heading)}")
    runs = [run for arm in arms for run in arm.runs]
    parts = [
        _table(cells(tidy(arms)), heading),
        _list(verdicts(arms)),
        f'<div class="notes">{_list(captions.captions(arms))}</div>',
        *(f'{_table(rows, head)}<p class="notes">{escape(note)}</p>' for head, rows, note in beside_tables(arms)),
        _figures(section.figures, heading),
        _folded("Commands", f"<pre>{escape(chr(10).join(own_commands(runs)))}</pre>"),
        _folded("Runs", _table(_runs(arms), f"Runs of {heading}")),
    ]
    return _section(name, heading, "\n".join(parts))


def _section(name: str, heading: str, content: str) -> str:
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n{content}\n</section>'


def _runs(arms: Sequence[Arm]) -> list[list[str]]:
    """One row per run: where its numbers can be looked up."""
    rows = [["folder", "arm", "seed", f"{metric(arms[0].metric).words}, final", "started", "commit"]]
    for arm in arms:
        for run in arm.runs:
            seen = run.environment
            value = metric(arm.metric).show(run.summary["metric"])
            rows.append(
                [run.name, arm.label, str(run.seed), value, seen.get("started", ""), seen.get("commit", "")[:12]]
            )
    return rows


def _table(cells: Sequence[Sequence[str]], caption: str) -> str:
    """A table whose first column names its rows; what stands in parentheses goes below the number."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in cells[0])
    rows = []
    for first, *rest in cells[1:]:
        rows.append(f'<tr><th scope="row">{escape(first)}</th>{"".join(map(_cell, rest))}</tr>')
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _cell(text: str) -> str:
    number, _, beside = text.partition(" (")
    if not beside.endswith(")"):
        return f"<td>{escape(text)}</td>"
    return f'<td>{escape(number)} <span class="beside">({escape(beside)}</span></td>'


def _figures(pngs: Sequence[Path], heading: str) -> str:
    """Figures inside the page, side by side where there is room."""
    figures = []
    for png in pngs:
        text, data = captions.figure(png.stem), base64.b64encode(png.read_bytes()).decode()
        alt, src = escape(f"{text}: {heading}"), f"data:image/png;base64,{data}"
        figures.append(f'<figure><img alt="{alt}" src="{src}"><figcaption>{escape(text)}</figcaption></figure>')
    return f'<div class="figures">{chr(10).join(figures)}</div>' if figures else ""


def _provenance(runs: Sequence[Run]) -> str:
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts(runs).items())
    return _section("provenance", "Where this comes from", f"<dl>{items}</dl>")


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"

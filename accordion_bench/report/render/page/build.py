"""The HTML page: the answer first, then the table, the figures, and where they come from."""

import base64
import hashlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.markers import MarkerStyle

from accordion_bench.options.units import counted
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.beside import beside_tables
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.provenance import facts, own_commands
from accordion_bench.report.compare.verdicts import answers, verdicts
from accordion_bench.report.read.printable import printable
from accordion_bench.report.render import captions
from accordion_bench.report.render.figures import INTERACTIVE, title
from accordion_bench.report.render.figures.scales import seeds, several
from accordion_bench.report.render.looks import ArmLook, looks
from accordion_bench.report.render.page import plots
from accordion_bench.report.render.page.plots import curves, most_points
from accordion_bench.report.render.tables import page_columns
from accordion_bench.runs.metrics import metric

WIDTH, HEIGHT, RADIUS = 34, 14, 5  # pixels


def swatch(look: ArmLook) -> str:
    """A line with its marker, as SVG."""
    dash = "" if look.dash == "solid" else look.dash.replace("px", "")
    marker = MarkerStyle(look.marker)
    outline = marker.get_path().transformed(marker.get_transform())
    fill = "#ffffff" if look.symbol.endswith("-open") else look.colour
    shapes = []
    for polygon in map(np.asarray, outline.to_polygons()):
        scale = RADIUS / np.hypot(*polygon.T).max()
        points = " ".join(f"{WIDTH / 2 + scale * x:.1f},{HEIGHT / 2 - scale * y:.1f}" for x, y in polygon)
        shapes.append(f'<polygon points="{points}" fill="{fill}" stroke="{look.colour}"/>')
    line = f'<line x1="0" y1="{HEIGHT // 2}" x2="{WIDTH}" y2="{HEIGHT // 2}" stroke="{look.colour}" stroke-width="2"'
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    head = f'<svg class="swatch" width="{WIDTH}" height="{HEIGHT}" aria-hidden="true">'
    return f"{head}{line}{dashed}/>{''.join(shapes)}</svg>"


NEEDS = ("plotly", "jinja2")
SCRIPTS = ("words.js", "table.js", "figures.js", "page.js")
FAILED = "Figures that could not be drawn"


@dataclass(frozen=True)
class Section:
    """One setting.

    Args:
        arms: of it.
        figures: PNG files, drawn of these arms.
        running: runs of the setting that go on, each as an arm: curves, in no table and no other figure.
    """

    arms: Sequence[Arm]
    figures: Sequence[Path]
    running: Sequence[Arm] = ()


def missing() -> str:
    """The sentence that says what a page needs; "" where all of it is installed."""
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if not absent:
        return ""
    return f"no report.html: it needs {' and '.join(absent)}; type pip install 'accordion-bench[report]'"


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
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    runs = [run for section in sections for arm in section.arms for run in arm.runs]
    count = sum(len(section.arms) for section in sections)
    most = most_points(count)
    files = PackageLoader(__package__, "")
    templates = Environment(loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    scripts = [*([get_plotlyjs(), *map(_own, SCRIPTS)] if sections else []), *([follow] if follow else [])]
    failed: list[str] = []
    data = [_data(section, most, failed) for section in sections]
    if failed:
        absent = {**absent, FAILED: [*absent.get(FAILED, ()), *failed]}
    return templates.get_template("page.html").render(
        title=f"{counted(len(runs), 'run')} in {counted(count, 'arm')}",
        policy=policy(scripts) + ("; connect-src 'self'" if follow else ""),
        style=_own("page.css"),
        scripts=scripts,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        sections=[_setting(number, section) for number, section in enumerate(sections, 1)],
        data=data,
        across=[_picture(png) for png in across],
        absent=absent,
        facts=facts(runs) if runs else {},
        commands=own_commands(runs),
    )


def policy(scripts: Sequence[str]) -> str:
    """What a browser that honours it lets this page do: run these scripts, load nothing, whatever is in a label."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _setting(number: int, section: Section) -> dict[str, Any]:
    """What the template says of one setting."""
    arms, shown = section.arms, [*section.arms, *section.running]
    legend = [(arm.label, swatch(look)) for arm, look in zip(shown, looks(shown), strict=True)]
    common = {"name": f"setting-{number}", "heading": captions.heading(shown[0]), "legend": legend}
    if not arms:
        return {**common, "answers": ["No run has finished yet."], "arms": []}
    return {
        **common,
        "answers": answers(arms),
        "verdicts": verdicts(arms),
        "arms": legend[: len(arms)],
        "columns": page_columns(tidy(arms)),
        "seeds": seeds(arms),
        "several": several(arms),
        "notes": captions.captions(arms),
        "beside": beside_tables(arms),
        "pictures": [_picture(png) for png in section.figures if png.stem.partition("-")[0] not in INTERACTIVE],
        "runs": _runs(arms),
    }


def _runs(arms: Sequence[Arm]) -> list[list[str]]:
    """One row per run: where its numbers can be looked up."""
    rows = [["folder", "arm", "seed", f"{metric(arms[0].metric).words}, final", "started", "commit"]]
    for arm in arms:
        for run in arm.runs:
            seen, value = run.environment, metric(arm.metric).show(run.summary["metric"])
            rows.append(
                [run.name, arm.label, str(run.seed), value, seen.get("started", ""), seen.get("commit", "")[:12]]
            )
    return rows


def _data(section: Section, most: int, failed: list[str]) -> dict[str, Any] | None:
    """What the page's scripts draw of one setting; None, and a sentence, where its curves cannot be drawn."""
    arms, shown = section.arms, [*section.arms, *section.running]

    def attempt(name: str, make: Callable[[], Any]) -> Any:
        """What a stranger's runs hold must not end all others."""
        try:
            return make()
        except Exception as error:
            why = f"{name} of {captions.heading(shown[0])}: {type(error).__name__}: {error}"
            failed.append(printable(why, longest=500))
            return None

    drawn = attempt("curves", lambda: curves(shown, most))
    if drawn is None:
        return None
    named = [
        {
            **{"label": arm.label, "n": arm.n, "running": number >= len(arms)},
            **{"colour": look.colour, "symbol": look.symbol, "dash": look.dash},
        }
        for number, (arm, look) in enumerate(zip(shown, looks(shown), strict=True))
    ]
    return {
        **drawn,
        "arms": named,
        "target": attempt("time to target", lambda: plots.to_target(arms)),
        "steps": attempt("times of a step", lambda: plots.step_times(arms)),
        "levels": attempt("levels", lambda: plots.levels(arms, most)),
    }


def _own(name: str) -> str:
    """A file of this package."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _picture(png: Path) -> tuple[str, str]:
    """(what it shows, the picture itself)."""
    return title(png), base64.b64encode(png.read_bytes()).decode()

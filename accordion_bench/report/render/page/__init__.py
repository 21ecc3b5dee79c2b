"""The self-contained HTML page: answer, table, interactive figures and provenance.

The numbers that the page's scripts draw, of curves and other figures, are embedded in it in compact form.
"""

import base64
import hashlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.markers import MarkerStyle
from numpy.typing import ArrayLike

from accordion_bench.options.units import counted, digits, human_rate
from accordion_bench.report.compare.arms import Arm, own_commands
from accordion_bench.report.compare.beside import Reached, beside_tables, first_look, mean, race
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.intervals import half_width
from accordion_bench.report.compare.times import communicates, modelled_seconds
from accordion_bench.report.compare.verdicts import answers, verdicts
from accordion_bench.report.read.schema import network_of
from accordion_bench.report.render import ArmLook, captions, looks
from accordion_bench.report.render.captions import hidden
from accordion_bench.report.render.figures import INTERACTIVE, title
from accordion_bench.report.render.figures.finals import EXCHANGE, STEP, parts, tells_times
from accordion_bench.report.render.figures.layers import MAPS, level_grid, with_levels
from accordion_bench.report.render.figures.sheet import (
    MOST,
    Array,
    column,
    curve_limits,
    ends,
    least_span,
    metric_label,
    metric_of,
    scores,
    seeds,
    several,
)
from accordion_bench.report.render.tables import page_columns
from accordion_bench.runs.metrics import metric, split_of
from accordion_bench.runs.untrusted import printable

POINTS = 300  # most points of a curve
TOGETHER = 6000  # most points of all curves of a page


def packed(values: ArrayLike) -> str:
    """Encode a row of numbers as base64 of float32; NaN marks unknown values."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def rows(values: Iterable[ArrayLike]) -> list[str]:
    """Encode each row of numbers."""
    return [packed(row) for row in values]


def thinned(count: int, most: int) -> list[int]:
    """Return the indices of at most `most` of `count` points: the first, the last, and others at equal distances."""
    if count <= most:
        return list(range(count))
    return np.unique(np.linspace(0, count - 1, most).round().astype(int)).tolist()


def most_points(curves: int) -> int:
    """Return how many points each of `curves` curves may have."""
    return max(2, min(POINTS, TOGETHER // max(curves, 1)))


STOPS = [digit * 10.0**power for power in range(6, 11) for digit in (1, 2, 5)] + [1e11]  # bit/s, of the slider

# key -> label of the switch, name, unit, note
AXES = {
    "epoch": ("epochs", "training", "epochs", ""),
    "wire_bytes": ("bytes sent", "sent per worker", "bytes", "What one worker's own link has sent."),
    "payload_bytes": ("payload", "payload per worker", "bytes", "What one worker has handed to the collectives."),
    "modelled_seconds": ("modelled time", "modelled time", "s", ""),
    "seconds": ("measured time", "measured time", "s", "Measured training time, without evaluation and warm-up."),
}


def curves(arms: Sequence[Arm], most: int) -> dict[str, Any]:
    """Return the data of one setting's curves, each of at most `most` points.

    Returns:
        `axes` that at least one arm has, `curves` with each arm's values on them, `stops` of the slider, `limits` of
            the metric, and its description.
    """
    stops, own = stops_of(arms)
    found = [_curve(arm, most, stops, own) for arm in arms]
    axes = [
        {"key": key, "short": short, "name": name, "unit": unit, "note": note}
        for key, (short, name, unit, note) in AXES.items()
        if any(key in curve["x"] for curve in found) and (key != "seconds" or all(map(communicates, arms)))
    ]
    of = metric_of(arms)
    return {
        "metric": {
            "label": metric_label(arms),
            "unit": of.unit,
            "decimals": 2 if of.percent else 4,
            "least": least_span(arms),
            "most": MOST if of.percent else None,
        },
        "limits": curve_limits(arms),
        "axes": axes,
        "stops": [{"bandwidth": stop, "name": human_rate(stop)} for stop in stops],
        "stop": stops.index(own),
        "model": formula(arms),
        "curves": found,
    }


def stops_of(arms: Sequence[Arm]) -> tuple[list[float], float]:
    """Return the bandwidths of the slider, and its initial position: the link of most arms, which is one of them."""
    own = [network_of(arm.config).bandwidth for arm in arms if arm.values("modelled_seconds")] or [1e9]
    return sorted({*STOPS, *own}), max(own, key=own.count)


def _curve(arm: Arm, most: int, stops: Sequence[float], own: float) -> dict[str, Any]:
    """Return the data of one arm's curve; times and bytes are means over the seeds."""
    values = scores(arm)
    kept = thinned(values.shape[1], most)
    last = ends(arm)
    x = {"epoch": packed(column(arm, "epoch")[0][kept] + 1)}
    for key in ("payload_bytes", "wire_bytes", "seconds"):
        mean = column(arm, key).mean(axis=0)[kept]
        if np.isfinite(mean).all() and mean[-1] > 0:
            x[key] = packed(mean)
    modelled = on_links(arm, stops, kept)
    return {
        "seeds": [str(seed) for seed in arm.seeds],
        "score": rows(values[:, kept]),
        "half": packed([half_width(values[:, epoch].tolist()) for epoch in kept]),
        "end": [known(float(np.mean(last))), known(half_width(last))],
        "x": x if modelled is None else {**x, "modelled_seconds": rows(modelled)},
    }


def known(value: float) -> float | None:
    """Return a number; None if it is NaN or infinite, which JSON cannot express."""
    return value if math.isfinite(value) else None


def on_links(arm: Arm, stops: Sequence[float], epochs: Sequence[int]) -> Array | None:
    """Return modelled time [stops, epochs], the mean over the seeds; None if rows have no model.

    At the runs' own bandwidth it equals the recorded time.
    """
    if not arm.sends() or not arm.values("modelled_seconds"):
        return None
    seconds = modelled_seconds(arm, stops, epochs).mean(axis=1)
    return seconds if np.isfinite(seconds).all() else None


def formula(arms: Sequence[Arm]) -> str:
    """Return the formula of modelled time in words; "" without modelled times."""
    known = [arm for arm in arms if arm.values("modelled_seconds")]
    if not known:
        return ""
    latencies = sorted({f"{arm.config['network']['latency'] * 1e6:g}" for arm in known})
    return (
        "Modelled, not measured: computation of one worker as measured + communication, 8 × wire bytes / bandwidth + "
        f"rounds × latency ({' or '.join(latencies)} µs), {hidden(known)}."
    )


def to_target(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """Return the data of seconds until the target; None if the runs have no common target, or none has reached it."""
    found = race(arms)
    if found is None or not found.drawn:
        return None
    return {
        "title": f"Time to {found.shown}",
        "name": f"{found.how} time [s]",
        "note": f"To the {first_look(arms)} that reached {found.shown} in the {split_of(arms[0].selected_by)} split.",
        "rows": [
            {
                "mean": mean(own.timed) if own.timed else None,
                "half": half_width(own.timed) if len(own.timed) > 1 else None,
                "beside": _unless_all(own, arm.n),
            }
            for arm, own in zip(arms, found.arms, strict=True)
        ],
    }


def _unless_all(own: Reached, seeds: int) -> str:
    """Return how many seeds have reached the target, if not all did."""
    if not own.timed:
        return own.untimed
    return "" if len(own.timed) == seeds else f"{len(own.timed)} of {seeds}"


def step_times(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """Return milliseconds of a step by part, None for an arm without times; None if no arm has times."""
    if any("compute_seconds" not in arm.runs[0].rows[-1] for arm in arms if tells_times(arm)):
        return None
    found = [{part: 1000 * s for part, s in parts(arm).items()} if tells_times(arm) else None for arm in arms]
    used = {part: STEP[part] for part in STEP if any(own[part] for own in found if own)}
    if not used:
        return None
    return {
        "parts": [
            {"name": part, "colour": colour, "values": [own and own[part] for own in found]}
            for part, colour in used.items()
        ],
        "beside": [_beside(own) for own in found],
        "note": _told(arms),
    }


def _beside(own: dict[str, float] | None) -> str:
    """Return times inside the exchange, which are not part of the bar; for an arm without times a remark."""
    if own is None:
        return "not told"
    done = [f"{part} {digits(own[part])} ms" for part in EXCHANGE if own[part]]
    return f"exchange in all, hidden or not: {', '.join(done)}" if done else ""


def _told(arms: Sequence[Arm]) -> str:
    text = "Mean over the steps after the first, and over the seeds."
    if any(not arm.attached and not communicates(arm) for arm in arms):
        text += " Workers share a process: all of them are in a step, and no communication."
    return text


def levels(arms: Sequence[Arm], most: int) -> list[dict[str, Any]]:
    """Return the level maps of up to `MAPS` arms, of their first seed."""
    return [_level_map(arm, arms, most) for arm in with_levels(arms)[:MAPS]]


def _level_map(arm: Arm, arms: Sequence[Arm], most: int) -> dict[str, Any]:
    grid, run = level_grid(arm, arms), arm.runs[0]
    kept = thinned(len(run.rows), most)
    return {
        "arm": list(arms).index(arm),
        "seed": str(run.seed),
        "layers": grid.layers,
        "epochs": packed(np.array(kept) + 1),
        "names": grid.names,
        "colours": grid.colours,
        "places": rows([[np.nan if (place := row[epoch]) is None else place for epoch in kept] for row in grid.places]),
    }


WIDTH, HEIGHT, RADIUS = 34, 14, 5  # pixels


def swatch(look: ArmLook) -> str:
    """Return a line with its marker, as SVG."""
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
    """Content of one setting.

    Args:
        arms: arms of the setting.
        figures: PNG files of these arms' figures.
        running: running runs of the setting, each as an arm; drawn as curves only, in no table or other figure.
    """

    arms: Sequence[Arm]
    figures: Sequence[Path]
    running: Sequence[Arm] = ()


def missing() -> str:
    """Return the sentence that names the packages to install; "" if none is missing."""
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if not absent:
        return ""
    return f"no report.html: it needs {' and '.join(absent)}; type pip install 'accordion-bench[report]'"


def page(
    sections: Sequence[Section], across: Sequence[Path], absent: dict[str, Sequence[str]], follow: str = ""
) -> str:
    """Return the whole page.

    Args:
        sections: one per setting.
        across: PNG files of figures that compare settings.
        absent: heading -> lines, for runs that enter no mean.
        follow: script that reloads the page when its runs change, see `serve`; "" = a static page.
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
        facts=captions.facts(runs) if runs else {},
        commands=own_commands(runs),
    )


def policy(scripts: Sequence[str]) -> str:
    """Return the content security policy: only these scripts run and nothing is loaded, whatever a label contains."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _setting(number: int, section: Section) -> dict[str, Any]:
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
    """Return one row per run that identifies it."""
    rows = [["folder", "arm", "seed", f"{metric(arms[0].metric).words}, final", "started", "commit"]]
    for arm in arms:
        for run in arm.runs:
            seen, value = run.environment, metric(arm.metric).show(run.summary["metric"])
            rows.append(
                [run.name, arm.label, str(run.seed), value, seen.get("started", ""), seen.get("commit", "")[:12]]
            )
    return rows


def _data(section: Section, most: int, failed: list[str]) -> dict[str, Any] | None:
    """Return the data that the scripts draw for one setting; None if its curves fail, which is noted in `failed`."""
    arms, shown = section.arms, [*section.arms, *section.running]

    def attempt(name: str, make: Callable[[], Any]) -> Any:
        """Run `make`; an error becomes a sentence, because invalid runs must not break the page of the others."""
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
        "target": attempt("time to target", lambda: to_target(arms)),
        "steps": attempt("times of a step", lambda: step_times(arms)),
        "levels": attempt("levels", lambda: levels(arms, most)),
    }


def _own(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _picture(png: Path) -> tuple[str, str]:
    return title(png), base64.b64encode(png.read_bytes()).decode()

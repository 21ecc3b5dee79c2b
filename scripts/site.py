"""Make the pages of the documentation site, which mkdocs then renders.

    python -m scripts.site [FOLDER]      # default: build/site

Pages of docs/ are copied, with their links changed to the locations on the site. A page for each method, and the API
reference, are generated from classes, docs/algorithms.md and stored results. FOLDER/mkdocs.yml is mkdocs.yml of the
checkout with the navigation.
"""

import argparse
import csv
import importlib
import inspect
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from accordion_bench.adaptive.fitted_codebook import FittedCodebook
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.options.option import Choice
from scripts import options

ROOT = package_dir().parent
DOCS = ROOT / "docs"
HOW_TO = ("ddp", "compressor", "data", "sweep", "table1", "report", "advice")
USE = (
    *("choices", "options", "matrix", "data", "attach", "sweeps", "machines", "checkpoints"),
    *("report", "advise", "netlab", "experiments"),
)
# heading: pages in docs/, or names of pages that are written here
NAV: Mapping[str, Sequence[str]] = {
    "Start": ("index.md", "tutorial.md"),
    "How to": tuple(f"howto/{name}.md" for name in HOW_TO),
    "Use": tuple(f"{name}.md" for name in USE),
    "Methods": ("methods/index.md",),
    "API": ("api.md",),
    "Explanation": ("measured.md", "protocol.md", "network.md", "algorithms.md", "performance.md"),
    "Decisions": ("decisions.md",),
}
METHODS = {"compressor": "Compressors", "adaptive": "Policies", "sync": "Synchronisation"}
STEERED = {"rank": "powersgd", "density": "topk", "bits": "qsgd"}
"""By knob a compressor that has it, which pages of policies name."""
API = {
    "In your own loop": (
        *(f"accordion_bench.attaching.api.{name}" for name in ("attach", "local", "attach_shards")),
        "accordion_bench.advising.api.advice",
        "accordion_bench.runs.weights.load_weights",
    ),
    "Reports": ("accordion_bench.report.compare", "accordion_bench.report.figure"),
    "Parts of your own": (
        "accordion_bench.compressors.oneshot.OneShot",
        "accordion_bench.adaptive.policy.Policy",
        "accordion_bench.datasets.images.ImageDataset",
        "accordion_bench.options.option.option",
        "accordion_bench.options.option.with_options",
    ),
}
ELSEWHERE = (
    "Presets of papers and their published numbers: [experiments](../experiments.md). What was measured and what was "
    "not: [measured](../measured.md)."
)
STYLE = """.md-grid { max-width: 78rem; }
.md-typeset td:first-child code { white-space: nowrap; }
"""
"""Outputs of a hundred characters fit, and names of options are whole."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.M | re.S)


class Section(NamedTuple):
    """A part of docs/algorithms.md under a heading."""

    heading: str
    text: str

    @property
    def link(self) -> str:
        return f"../algorithms.md#{slug(self.heading)}"


def slug(heading: str) -> str:
    """Return the anchor of a heading as GitHub and the site generate it."""
    words = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


# ---- pages of the checkout


def rewritten(text: str, page: Path, wanted: set[Path]) -> str:
    """Return a page with links to locations on the site; a target that is not on the site is named by its path.

    Args:
        text: text of the page.
        page: path of the page in the checkout, from which its links start.
        wanted: set to which the files that the site needs are added.
    """

    def one(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        file = Path(os.path.normpath(page.parent / path))
        if file.suffix in (".md", ".png", ".svg") and (ROOT / file).is_file():
            wanted.add(file)
            there = os.path.relpath(place(file), place(page).parent)
            return f"{picture}[{label}]({there}{'#' + anchor if anchor else ''})"
        return f"{label} (`{file}`)"

    parts = CODE.split(text)
    return "".join(part if i % 2 else LINK.sub(one, part) for i, part in enumerate(parts)) if "[" in text else text


def place(file: Path) -> Path:
    """Return the location of a file of the checkout on the site."""
    return Path(*file.parts[1:]) if file.parts[0] == "docs" else Path("repository", *file.parts)


def copied(into: Path) -> None:
    """Return every page of the navigation, and all files that their links refer to."""
    wanted = {Path("docs", page) for pages in NAV.values() for page in pages if (DOCS / page).is_file()}
    done: set[Path] = set()
    while todo := wanted - done:
        for file in todo:
            target = into / place(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".md":
                target.write_text(rewritten((ROOT / file).read_text("utf-8"), file, wanted), encoding="utf-8")
            else:
                shutil.copyfile(ROOT / file, target)
            done.add(file)


# ---- pages that are written here


def sections() -> list[Section]:
    """Return the sections of docs/algorithms.md."""
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    parts = re.split(r"^##+ (.+)$", text, flags=re.M)
    return [Section(heading.strip(), body.strip()) for heading, body in zip(parts[1::2], parts[2::2], strict=True)]


def about(group: str, name: str, shown: str, found: Sequence[Section]) -> tuple[Section | None, list[Section]]:
    """Return the section whose heading names a method, and the other sections that mention it."""
    title = re.compile(rf"^{re.escape(shown)}\b|[`=]{name}`", re.I)
    own = next((part for part in found if title.search(part.heading)), None)
    word = re.compile(rf"{group}={name}\b|`{name}`|\b{re.escape(shown)}\b")
    return own, [part for part in found if part is not own and word.search(part.text)]


def display_name(cls: Any, name: str) -> str:
    """Return the name of a choice as reports print it."""
    plain = name.replace("_", "")
    return cls.description.display_names.get(name) or (cls.__name__ if cls.__name__.lower() == plain else name)


def doc(cls: Any) -> str:
    """Return the docstring of a class without its arguments."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    return re.split(r"\n\n(?:Args|Attributes|Class attributes|Returns|Raises|Example):\n", text)[0]


def own_results(shown: str) -> Iterator[str]:
    """Yield the rows of results/compressors/table.csv whose arm is a method, as Markdown."""
    with (ROOT / "results" / "compressors" / "table.csv").open(encoding="utf-8", newline="") as table:
        rows = [row for row in csv.DictReader(table) if re.match(rf"{re.escape(shown)}\b", row["arm"], re.I)]
    told = [
        f"| {row['arm']} | {100 * float(row['accuracy']):.2f} % | {float(row['wire_times_less']):.3g}x |"
        for row in rows
    ]
    if told:
        yield "ResNet-8 on scikit-learn's digits, 4 workers, 40 epochs, three seeds: a check that it trains."
        yield "\n".join(["| arm | accuracy, final | fewer bytes on the wire |", "|---|---|---|", *told])


def chosen(group: str, name: str, cls: Any) -> list[str]:
    """Return the overrides that select a method: its name, and the options without which it is refused."""
    beside = {other: choice for other, choice in cls.description.requires.items() if isinstance(choice, str)}
    if group == "adaptive":
        fits = cls.knobs[0] if cls.knobs else "bits" if issubclass(cls, FittedCodebook) else "rank"
        beside["compressor"] = STEERED[fits]
    return [f"{group}={name}", *(f"{other}={choice}" for other, choice in sorted(beside.items()))]


def method_page(group: str, name: str, cls: Any, choice: Choice, found: Sequence[Section]) -> str:
    """Return the page of one method."""
    shown = display_name(cls, name)
    own, others = about(group, name, shown, found)
    typed = " ".join(chosen(group, name, cls))
    lines = [f"# {shown}", f"`{group}={name}`: {choice.told}.", doc(cls)]
    commands = [f"python -m accordion_bench {typed}", f"python -m accordion_bench --help {group}={name}"]
    lines += ["## Run it", "\n".join(["```bash", *commands, "```"])]
    rows = list(options.lines_of(group, cls, choice))
    if rows:
        table = [f"| `{key}` | `{options.as_yaml(value)}` | {told} |" for key, value, told in rows]
        lines += ["## Options", "\n".join(["| option | default | |", "|---|---|---|", *table])]
    if own is not None:
        text = re.sub(r"^(#+) ", r"#\1 ", own.text, flags=re.M)
        lines += ["## Equations, payload, source", f"*{own.heading}*", text]
    if others:
        links = "\n".join(f"- [{part.heading.replace('`', '')}]({part.link})" for part in others)
        lines += ["## Also in Algorithms" if own else "## Equations, payload, source", links]
    lines += ["## Results", *(own_results(shown) if group == "compressor" else ()), ELSEWHERE]
    lines += [f"Class: `{cls.__module__}.{cls.__qualname__}`"]
    return "\n\n".join(lines) + "\n"


def methods(into: Path) -> Iterator[tuple[str, list[Any]]]:
    """Write a page for each method; yield the navigation of each group."""
    found, wanted = sections(), set[Path]()
    lists = ["# Methods", "A page each: what it does, its options, equations and results."]
    (into / "methods").mkdir(parents=True, exist_ok=True)
    for group, heading in METHODS.items():
        entries, names = [], []
        for name, cls, choice in sorted(options.declared(group), key=lambda case: case[0]):
            page = Path("methods", f"{group}-{name}.md")
            text = rewritten(method_page(group, name, cls, choice, found), Path("docs/methods/x.md"), wanted)
            (into / page).write_text(text, encoding="utf-8")
            shown = display_name(cls, name)
            entries.append({f"{shown} ({name})" if shown != name else name: str(page)})
            names.append(f"| [{shown}]({page.name}) | `{name}` | {choice.told} |")
        lists += [f"## {heading}", "\n".join([f"| | `{group}=` | |", "|---|---|---|", *names])]
        yield heading, entries
    (into / "methods" / "index.md").write_text("\n\n".join(lists) + "\n", encoding="utf-8")


def api(into: Path) -> None:
    """Return the reference of public names, which mkdocstrings fills from docstrings."""
    lines = ["# API", "Public names. Everything else may change between versions."]
    for heading, names in API.items():
        lines += [f"## {heading}"]
        for name in names:
            module, _, own = name.rpartition(".")
            assert hasattr(importlib.import_module(module), own), name
            lines += [f"::: {name}"]
    (into / "api.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def title(page: Path) -> str:
    """Return the first heading of a page, without Markdown marks."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.M)
    return re.sub(r"[`*]", "", found[1]) if found else page.stem


def assemble(folder: Path) -> Path:
    """Write all pages to FOLDER/pages; return the configuration for mkdocs."""
    shutil.rmtree(folder, ignore_errors=True)
    into = folder / "pages"
    into.mkdir(parents=True)
    copied(into)
    of_methods = [{heading: entries} for heading, entries in methods(into)]
    api(into)
    (into / "extra.css").write_text(STYLE, encoding="utf-8")
    nav = []
    for heading, pages in NAV.items():
        listed: list[Any] = [{title(into / page): page} for page in pages]
        if heading == "Methods":
            listed += of_methods
        nav.append({heading: listed if len(listed) > 1 else pages[0]})
    config = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": "pages", "site_dir": "html", "nav": nav}
    file = folder / "mkdocs.yml"
    file.write_text(yaml.safe_dump(config, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return file


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("scripts.site", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    print(assemble(parser.parse_args().folder))


if __name__ == "__main__":
    main()

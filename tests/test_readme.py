"""README.md: short, and true where a machine can tell (commands: test_documented_commands.py); lines of all pages."""

import re
import shutil
import subprocess

import pytest

from accordion_bench.options.conf_dir import yaml_files
from tests.kit import pages
from tests.kit.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_takes_two_minutes_to_read():
    assert len(README.split()) < 700
    assert max(map(len, README.splitlines())) <= 120


@pytest.mark.parametrize("page", pages.PROSE, ids=str)
def test_lines_of_prose_fit_an_editor(page):
    assert pages.long_lines(page) == []


def test_its_links_lead_somewhere():
    linked = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"`(results/\w+)`", README)
    assert all((ROOT / path).exists() for path in linked if path != "results/runs")


@pytest.mark.parametrize("page", [page for page in pages.PROSE if page.name != "CHANGELOG.md"], ids=str)
def test_modules_that_a_page_names_exist(page):
    package = ROOT / "accordion_bench"
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`(?:accordion_bench/)?(\w+(?:/\w+)+)(?:\.py)?`", text)
    named = [path for path in named if (package / path.partition("/")[0]).is_dir()]
    places = [(package, path) for path in named] + [(ROOT, path) for path in named]
    there = {path for folder, path in places if (folder / path).exists() or (folder / f"{path}.py").exists()}
    assert sorted(set(named) - there) == []


def test_its_counts_are_true():
    kinds = r"(\d+)\s(compressors|adaptive policies|ways|models|data sets)"
    told = {kind: int(count) for count, kind in re.findall(kinds, README)}
    counts = {group: len(set(yaml_files(group)) - {"none"}) for group in ("compressor", "adaptive", "sync", "model")}
    counts["dataset"] = len(yaml_files("dataset"))
    assert list(told.values()) == list(counts.values())


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="no checkout of git")
@pytest.mark.parametrize(
    "folder",
    [
        *(f"results/{name}" for name in ("runs", "report", "netlab", "advice_runs")),
        "examples/own_parts/results",
        "data",
    ],
)
def test_what_the_commands_write_is_ignored(folder):
    done = subprocess.run(["git", "check-ignore", "-q", f"{folder}/x"], cwd=ROOT)
    assert done.returncode == 0

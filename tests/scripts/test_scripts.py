"""Every script runs, in its smallest form; every command that a shell script types can be composed."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pandas as pd
import pytest

from accordion_bench.__main__ import in_order
from accordion_bench.config.compose import compose
from accordion_bench.report.render.figures.sheet import styled
from scripts.studies import draw_kept
from tests.kit import composed
from tests.kit.paths import ROOT

ONCE, TWICE = ["--rounds", "1"], ["--rounds", "2"]
SMALLEST = {
    "claims": ["gpt", "--dry"],
    "bench.against": [".", *ONCE, "--seconds", "0.1"],
    "bench.checkpoint": [],
    "bench.codec": ["--floats", "1", "--only", "topk", *ONCE],
    "bench.compose": [],
    "bench.data": ["batch", *TWICE],
    "bench.elastic": ["steps", "changes", *TWICE],
    "bench.local": ["step", *TWICE],
    "bench.memory": [*ONCE, "--images", "64"],
    "bench.powersgd": TWICE,
    "bench.report": ["--settings", "1", "--arms", "2", "--seeds", "1", "--epochs", "3"],
    "bench.step": ["plain", "workers", "detector", "ddp", *TWICE],
    "bench.threads": [*ONCE, "--arms", "digits", "--busy", "1"],
    "gpu.report": ["--smallest", "--out", "TMP/gpu"],
    "gpu.replay": ["--device", "cpu", "--rounds", "2", "--out", "TMP/gpu"],
    "studies.compare_advised": ["--epochs", "2", "--seeds", "0", "--runs", "TMP/runs", "--page", "TMP/page.md"],
    "studies.end_of_gloo": ["--pairs", "1", "--only", "attach, detach"],
    "studies.entropy": [],
    "studies.sparse_wire": ["--out", "TMP/wire"],
    "studies.local_methods": ["--minutes", "0", "--runs", "TMP/runs", "--out", "TMP/out"],
    "golden": ["--compare", "accordion_powersgd"],
    "golden_messages": ["--compare", "--only", "cpu", "bf16"],
    "launches": ["--only", "none"],
    "matrix": ["TMP/matrix.md"],
}
LINKS = {
    "bench.attach": ["--rates", "1gbit", "--arms", "DDP", "attach(bf16), DDP", *ONCE, "--seconds", "0.2"],
    "bench.hooks": ["--model", "resnet8", "--arms", "DDP, allreduce_hook", "dense", *ONCE, "--out", "TMP/hooks"],
    "bench.netlab": ["--rates", "1gbit", "--arms", "dense", *ONCE, "--seconds", "0.2"],
    "studies.validate_advice": [
        *("measure", "--models", "lstm", "--hosts", "2", "--rates", "1gbit", "--arms", "dense", "local SGD"),
        *(*ONCE, "--seconds", "0.1", "--out", "TMP/advice"),
    ],
    "studies.validate_simulation": ["--hosts", "2", *ONCE, "--seconds", "0.2"],
}
PARTS = {
    *("packed", "golden_runs", "echo", "bench.harness", "bench.arms", "bench.hosts"),
    *("gpu.exchange", "gpu.sections", "gpu.steps", "studies.grace_codecs"),
    *(f"studies.advice_{part}" for part in ("cells", "measure", "trial", "predict", "compare", "break_even")),
}
STUDIES = (
    "studies.compressors",
    "studies.papers",
    "studies.cited_methods",
    "studies.residuals",
    "studies.time_to_accuracy",
    "studies.validate_model",
)
SHOWN = {"demo_report", "studies.draw_kept"}  # from what is kept here: tested below
KEPT = {"studies.report_kept", "few_colours"}  # what stays of a report: the end of `papers`; test_claims.py
# make install; demo and compressors, one after another; make wheel; a package index; test_try_cases; test_option;
# test_site; test_kill_loop; test_elastic_links; a GPU
OTHERWISE = {
    *("gpu.next", "setup", "studies.figures", "try_wheel", "lock", "try_cases", "options", "site", "kill_loop"),
    "behind_links",
}


def test_every_script_is_tried():
    folder = ROOT / "scripts"
    found = [
        *folder.glob("[!_]*.*"),
        *(file for part in ("bench", "gpu", "studies") for file in folder.glob(f"{part}/[!_]*.*")),
    ]
    names = {".".join(file.relative_to(folder).with_suffix("").parts) for file in found}
    assert names == {*SMALLEST, *LINKS, *PARTS, *STUDIES, *OTHERWISE, *SHOWN, *KEPT}


def run(name: str, arguments: list[str], tmp_path: Path) -> None:
    typed = [argument.replace("TMP", str(tmp_path)) for argument in arguments]
    command = [sys.executable, "-m", f"scripts.{name}", *typed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_script_runs(tmp_path, name):
    run(name, SMALLEST[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [["--flat"], ["--threads", "2"], ["--avx2"]])
def test_other_ways_to_time_codecs(tmp_path, mode):
    run("bench.codec", [*mode, *SMALLEST["bench.codec"]], tmp_path)


@pytest.mark.slow
@pytest.mark.netlab
@pytest.mark.parametrize("name", LINKS)
def test_a_script_behind_links_runs(tmp_path, name):
    run(name, LINKS[name], tmp_path)


def typed(script: str, tmp_path: Path) -> list[list[str]]:
    """What a shell script types after `python -m`, each command once whatever its seed; nothing is run."""
    record, stub = tmp_path / "typed", tmp_path / "python"
    stub.write_text('#!/usr/bin/env bash\nprintf "%q " "$@" >>' + shlex.quote(str(record)) + f"\necho >>{record}\n")
    stub.chmod(0o755)
    arguments = [str(tmp_path)] if script.endswith(("papers", "time_to_accuracy")) else []
    environ = {**os.environ, "PYTHON": str(stub), "RUNS": str(tmp_path / "runs"), "JOBS": "1", "SEEDS": "0"}
    command = ["bash", str(ROOT / "scripts" / f"{script.replace('.', '/')}.sh"), *arguments]
    subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, timeout=60)  # ends where it wants a table
    commands = [shlex.split(line) for line in record.read_text().splitlines()]
    return [command[1:] for command in commands if command[:2] in (["-m", "accordion_bench"], ["-m", NETLAB])]


NETLAB = "accordion_bench.netlab"


@pytest.mark.slow
@pytest.mark.parametrize("script", STUDIES)
def test_what_a_shell_script_types_is_accepted(tmp_path, script):
    commands = typed(script, tmp_path)
    assert len(commands) >= 4
    for module, *words in commands:
        if "--probe" not in words:
            hosts = ["comm=gloo", "comm.processes=4"] if module == NETLAB else []
            composed.validated(compose([*in_order(first_cell(words)), *hosts]))


def test_the_kept_runs_that_demo_report_shows_are_there():
    """Five seeds of each of its arms."""
    words = (ROOT / "scripts" / "demo_report.sh").read_text()
    folder, arms = re.search(r'"\$scratch"/(\S+)/\{(\S+)\}-\*', words).groups()
    with tarfile.open(ROOT / re.search(r"\S+\.tar\.xz", words)[0]) as kept:
        names = [name for name in kept.getnames() if name.endswith("/done")]
    for arm in arms.split(","):
        assert sum(name.startswith(f"{folder}/{arm}-") for name in names) == 5, arm


@pytest.mark.parametrize("folder", draw_kept.DRAWN)
def test_figures_of_kept_tables_have_todays_names_and_nothing_above_100_percent(folder):
    for _, rows in pd.read_csv(ROOT / "results" / folder / "table.csv").groupby("dataset"):
        with styled():
            figure = draw_kept.draw(rows)
        (axes,) = figure.axes
        bars = [line for line in axes.lines if line.get_gid() in ("interval", "cut", "end")]
        assert bars and max(float(max(line.get_xdata())) for line in bars) <= 100
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert len(names) == len(rows) and names[0].startswith("dense")
        assert not {"qsgd", "signsgd", "trn", "efsignsgd", "OneBit"} & {name.split()[0] for name in names}


@pytest.mark.slow
def test_demo_report_shows_them(tmp_path):
    command = ["bash", str(ROOT / "scripts" / "demo_report.sh"), str(tmp_path)]
    environ = {**os.environ, "PYTHON": sys.executable}
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=280).stdout
    assert "Accordion (PowerSGD rank 4/1)" in said and (tmp_path / "comparison.png").is_file()


def first_cell(words: list[str]) -> list[str]:
    """The overrides among some words, of a sweep those of its first cell."""
    pairs = [(key, value) for key, equals, value in (word.partition("=") for word in words) if equals]
    return [f"{key}={value if '[' in value else value.split(',')[0]}" for key, value in pairs]


def test_makes_targets_name_what_there_is(tmp_path):
    """`make -n` of each: the files that its commands name exist."""
    targets = [line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if "  ## " in line]
    assert {"install", "demo", "test", "test-slow", "test-avx2", "bench", "figures", "methods"} <= set(targets)
    for target in targets:
        shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for word in shown.split():
            if word.startswith("scripts/") or word.startswith("tests/"):
                assert (ROOT / word).exists(), (target, word)
            if word.startswith("scripts."):
                assert (ROOT / f"{word.replace('.', '/')}.py").exists(), (target, word)

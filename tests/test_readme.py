"""README.md: short, true where a machine can tell, and every command of it is one that the program takes."""

import re
import shlex

import pytest

from accordion_bench.advise import arguments, cluster, subject
from accordion_bench.advising import asked_device
from accordion_bench.cli import command_line
from accordion_bench.cli.help import text as help_text
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.options.instantiate import build
from tests.kit import composed
from tests.kit.paths import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip() for line in README.splitlines() if line.startswith("    ") and line[4] != " "
]
OURS = [line for line in COMMANDS if "-m accordion_bench" in line and not re.search(r"\.(report|advise)\b", line)]


def test_it_takes_two_minutes_to_read():
    assert len(README.split()) < 700
    assert max(map(len, README.splitlines())) <= 120


def test_its_links_lead_somewhere():
    linked = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"`(results/\w+)`", README)
    assert all((ROOT / path).exists() for path in linked if path != "results/runs")


def test_its_targets_and_counts_are_true():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make ([a-z-]+)", "\n".join(COMMANDS))) <= set(targets)
    told = {kind: int(count) for count, kind in re.findall(r"(\d+) (compressors|words|ways|models|data sets)", README)}
    counts = {group: len(set(yaml_files(group)) - {"none"}) for group in ("compressor", "adaptive", "sync", "model")}
    counts["dataset"] = len(yaml_files("dataset"))
    assert list(told.values()) == list(counts.values())


@pytest.mark.parametrize("command", OURS)
def test_its_commands_are_taken(command):
    words = shlex.split(command)
    words = words[words.index("-m") + 2 :]
    command_line.refuse_unreadable([word for word in words if word != command_line.DRY_RUN])
    if "--help" in words:
        assert help_text(words)
        return
    overrides = [word for word in words if "=" in word]
    single = [word if "[" in word else word.partition(",")[0] for word in overrides]  # a sweep's first cell
    cfg = composed.cfg(*single, *(["+arm=dense"] if any("experiment=" in word for word in single) else []))
    composed.validated(cfg)


def test_its_advice_can_be_asked_for():
    told = README + (ROOT / "docs/advise.md").read_text()
    commands = [
        line.partition(" #")[0] for line in re.findall(r"^    python -m accordion_bench\.advise (.*)$", told, re.M)
    ]
    assert len(commands) == 5
    for command in commands:
        args = arguments.read(shlex.split(command))
        _, words = asked_device.split(args.overrides)
        machines, overrides = cluster.split(words)
        config, _ = subject.composed([*overrides, f"network.workers_per_machine={machines.workers_each}"])
        build(config.network, "network")

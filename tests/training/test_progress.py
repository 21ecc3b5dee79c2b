"""What a run says: lines, and below them a bar on a terminal."""

import os
import re
import shutil
import subprocess
import time

import pytest

from accordion_bench.options.units import human_seconds
from accordion_bench.runs.metrics import METRICS
from accordion_bench.training import progress
from accordion_bench.training.progress import Heartbeat
from tests.kit.local import trained, trainer_for
from tests.kit.paths import ROOT
from tests.kit.terminal import Terminal

EPOCH = r"epoch (\d) of 4: accuracy [\d.]+ %, loss [\d.]+, [\d,]+ samples/s, payload [\d.]+ [kM]B, \d+ s left"


def test_a_line_per_epoch(tmp_path, capsys):
    trained(tmp_path)
    printed = capsys.readouterr()
    found = [re.fullmatch(EPOCH, line) for line in printed.out.splitlines()]
    assert [match and match[1] for match in found] == ["1", "2", "3", "4"] and printed.err == ""


@pytest.fixture
def drawn_on(tmp_path, monkeypatch):
    """Train on a terminal of so many columns; returns it when all is drawn."""

    def drawn(columns: int, *overrides: str) -> Terminal:
        terminal = Terminal(columns)
        with (
            open(terminal.descriptor, "w", closefd=False) as out,
            open(terminal.descriptor, "w", closefd=False) as error,
        ):
            monkeypatch.setattr("sys.stdout", out)
            monkeypatch.setattr("sys.stderr", error)
            trained(tmp_path, *overrides)
        terminal.close()
        return terminal

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    return drawn


@pytest.mark.parametrize("columns", [132, 80, 40, 20])
@pytest.mark.parametrize("metric", ["accuracy", "perplexity", "bits_per_byte"])
def test_on_a_terminal_the_metric_comes_first(columns, metric, drawn_on, monkeypatch):
    """It is never cut off; each drawing fits into a line, and nothing of the bar stays below the epochs' lines."""
    original = progress.Progress.epoch_over
    monkeypatch.setattr(
        progress.Progress, "epoch_over", lambda self, _, value, *rest: original(self, METRICS[metric], value, *rest)
    )
    terminal = drawn_on(columns, "epochs=3")
    value = r"[\d.]+ %" if metric == "accuracy" else r"[\d.,]+"
    bars = [text for text in terminal.drawings if "=" in text]
    evaluated = [text for text in bars if not text.startswith("loss=")]
    assert len(evaluated) >= 12 and all(re.match(rf"{metric}={value}(, |$| )", text) for text in evaluated)
    assert all(len(text) <= max(columns, len(f"{metric}=99.99 %")) for text in bars)
    *epochs, rest = terminal.lines
    assert [re.match(rf"epoch \d of 3: {metric} {value}", line)[0][6] for line in epochs] == ["1", "2", "3"]
    assert rest == "" and all(len(line) <= max(columns, 34) for line in epochs)


def test_a_wide_terminal_has_all_figures(drawn_on):
    bars = [text for text in drawn_on(132).drawings if text.startswith("accuracy=")]
    assert all(re.search(r"loss=.*, \d+/24, \[\d\d:\d\d<.*step/s\], sent=.* +\d+%\|.*\|$", text) for text in bars)


def test_the_bar_shows_the_newest_metric(drawn_on):
    """Also while the line of its epoch is written."""
    drawings = drawn_on(80).drawings
    told = {
        i: match[1] for i, text in enumerate(drawings) if (match := re.match(r"epoch \d of 4: accuracy (\S+)", text))
    }
    assert len(told) == 4
    for at, value in told.items():
        assert next(text for text in drawings[at + 1 :] if "=" in text).startswith(f"accuracy={value} %")


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_draw_gets_lines(term, drawn_on, monkeypatch):
    monkeypatch.setenv("TERM", term)
    terminal = drawn_on(80)
    assert "\r" not in terminal.drawn.replace("\r\n", "") and "\x1b" not in terminal.drawn
    *lines, rest = terminal.lines
    assert rest == "" and all(re.fullmatch(EPOCH, line) for line in lines) and len(lines) == 4


@pytest.mark.parametrize("elsewhere", ["stdout", "stderr"])
def test_no_bar_where_one_stream_goes_elsewhere(elsewhere, tmp_path, monkeypatch, capsys):
    terminal = Terminal(80)
    with open(terminal.descriptor, "w", closefd=False) as stream:
        monkeypatch.setattr(f"sys.{'stderr' if elsewhere == 'stdout' else 'stdout'}", stream)
        trained(tmp_path)
    terminal.close()
    lines = terminal.lines[:-1] if elsewhere == "stderr" else capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(EPOCH, line) for line in lines) and len(lines) == 4


@pytest.mark.parametrize(
    "width, expected", [(100, "first, second, third"), (13, "first, second"), (12, "first"), (2, "first")]
)
def test_only_whole_parts_are_told(width, expected):
    assert progress.fitting(["first", "second", "third"], width) == (expected, len(expected))


def test_only_the_leader_speaks(tmp_path, capsys):
    trainer = trainer_for(tmp_path)
    trainer.progress = progress.Progress(False, trainer.sampler.seen)
    trainer.fit()
    assert capsys.readouterr().out == ""


def test_a_long_epoch_tells_its_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    trained(tmp_path, "epochs=1")
    steps = [line for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert [line.split(":")[0] for line in steps] == [f"epoch 1 of 1, step {i} of 6" for i in range(1, 7)]
    assert re.search(r": loss [\d.]+, [\d,]+ samples/s, payload", steps[0])


def test_the_speed_counts_samples_of_all_workers(tmp_path, monkeypatch):
    """96 samples in a second, of which the last batch is a partial one."""
    trainer = trainer_for(tmp_path, "epochs=1", "batch_size=5")
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    trainer.sampler.begin_epoch(0, 5)
    trainer.progress.begin_epoch(trainer.position)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1.0)
    trainer.position.step_in_epoch = trainer.position.steps_per_epoch
    assert trainer.progress._samples_per_second(trainer.position) == 96


def test_an_epoch_without_new_steps_has_no_speed(tmp_path, capsys):
    """A run that is resumed at the end of an epoch writes that epoch's line again."""
    trainer = trainer_for(tmp_path, "epochs=2")
    position = trainer.position
    position.step = position.step_in_epoch = position.steps_per_epoch
    trainer.progress.begin(2 * position.step, position.step)
    trainer.progress.epoch_over(METRICS["accuracy"], 0.5, 1.0, position, trainer.comm)
    trainer.progress.close()
    assert re.search(r"loss 1.0000, payload [^,]+$", capsys.readouterr().out)


def test_no_silence(monkeypatch):
    """Also while something takes long in one place: the heartbeat is a thread."""
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    said: list[str] = []
    original = Heartbeat.say
    monkeypatch.setattr(Heartbeat, "say", lambda self, line: (said.append(line), original(self, line)))

    def heard(start: str, times: int) -> bool:
        deadline = time.monotonic() + 20
        while sum(line.startswith(start) for line in said) < times and time.monotonic() < deadline:
            time.sleep(0.01)
        return sum(line.startswith(start) for line in said) >= times

    with Heartbeat(True, "waiting") as heart:
        assert heard("still waiting, for ", 2)
        heart.now("working")
        assert heard("still working, for ", 1)
    silent = len(said)
    time.sleep(0.2)
    assert len(said) == silent
    with Heartbeat(False, "waiting"):
        time.sleep(0.2)
    assert len(said) == silent


def test_the_silence_before_a_heartbeat_does_not_count(monkeypatch):
    """The data were loaded between its construction and its start."""
    monkeypatch.setattr(progress, "PATIENCE", 0.5)
    said: list[str] = []
    monkeypatch.setattr(Heartbeat, "say", lambda self, line: said.append(line))
    heart = Heartbeat(True, "waiting")
    time.sleep(0.6)
    with heart:
        time.sleep(0.1)
    assert said == []


def test_remaining_time_is_readable():
    assert [human_seconds(s) for s in (0.4, 59.6, 200, 7500)] == ["0 s", "1 min 0 s", "3 min 20 s", "2 h 5 min"]


@pytest.mark.slow
def test_installing_is_not_silent(tmp_path):
    """With an installer that takes 9 seconds."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    installing = "mkdir -p .venv/bin; cp /bin/true .venv/bin/python"
    uv.write_text(f'#!/bin/sh\ncase "$*" in venv*) {installing};; *--editable*) sleep 9;; esac\n')
    uv.chmod(0o755)
    environ = {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = [line.split(",")[0] for line in done.stderr.splitlines()]
    assert told[:2] == ["installing into .venv", "still installing"]

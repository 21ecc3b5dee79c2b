"""A report replaces the old one as a whole, or not at all; a figure that fails takes nothing with it."""

import contextlib
import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from accordion_bench.report import read
from accordion_bench.report.__main__ import main as report_main
from accordion_bench.report.render import figures, write
from accordion_bench.report.render.page import Section
from accordion_bench.report.render.write import DAY, INDEX, replacing
from accordion_bench.runs import durable
from tests.kit.processes import killed, start_forking
from tests.report.test_report import no_figures, run_folder  # noqa: F401

TEXTS = {"table.md", "README.md", "table.csv", "table.tex", "report.html"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class DiskFull:
    """Fails at one of the writes, syncs and renames of a report."""

    def __init__(self, patched: pytest.MonkeyPatch, at: int) -> None:
        self.left, self.renames = at, 0
        for owner, name in ((write, "_write"), (figures, "draw_one"), (durable, "sync"), (os, "replace")):
            patched.setattr(owner, name, self.failing(getattr(owner, name), rename=name == "replace"))

    def failing(self, do, rename):
        def may_fail(*arguments):
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.renames += rename
            return do(*arguments)

        return may_fail


def stub(name: str, arms: object, out: Path, suffix: str, *rest: object) -> Path:
    png = out / f"{name}{suffix}.png"
    png.write_bytes(f"{len(arms)} arms".encode())  # type: ignore[arg-type]
    return png


def stub_page(sections: list[Section], across: list[Path], absent: dict) -> str:
    return f"{[[arm.label for arm in section.arms] for section in sections]}\n" * 10_000


def make_quick(patched: pytest.MonkeyPatch) -> None:
    """Two figures and a page that take no time, made in this process."""
    patched.setattr(os, "sched_getaffinity", lambda _: {0})
    patched.setattr(figures, "OF_A_SETTING", ("comparison", "norms"))
    patched.setattr(figures, "draw_one", stub)
    patched.setattr(write, "page", stub_page)


@pytest.fixture
def quick(monkeypatch):
    make_quick(monkeypatch)


def test_a_failure_at_any_write_leaves_the_old_report_whole(tmp_path, quick, monkeypatch, capsys):
    run_folder(tmp_path / "runs", "none")
    out = tmp_path / "out"
    typed = [str(tmp_path / "runs"), "--out", str(out)]
    assert report_main(typed) == 0
    (out / "mine.txt").write_text("kept")
    old = contents(out)
    run_folder(tmp_path / "runs", "topk", accuracy=0.8)
    assert report_main([*typed[:2], str(tmp_path / "new")]) == 0
    new = contents(tmp_path / "new")
    assert new.keys() == TEXTS | {"comparison.png", "norms.png"} == old.keys() - {"mine.txt"}
    failures = 0
    while True:
        with pytest.MonkeyPatch.context() as patched:
            disk = DiskFull(patched, at=failures + 1)
            capsys.readouterr()
            status = report_main(typed)
        if status == 0:
            break
        failures += 1
        assert (
            capsys.readouterr()
            .err.splitlines()[-1]
            .startswith(f"--out must be a folder that can be written, got {out}: No space left")
        )
        found = contents(out)
        assert found.keys() == old.keys()
        changed = {name for name in found if found[name] != old[name]}
        assert all(found[name] == new[name] for name in changed)
        assert len(changed) <= disk.renames
        # it is the last of all
        assert "README.md" not in changed or found == {**new, "mine.txt": b"kept"}
        for name in changed:
            (out / name).write_bytes(old[name])
    assert failures == 2 + len(TEXTS) + 2 * len(new) + 1  # at last the folder is synced
    assert contents(out) == {**new, "mine.txt": b"kept"}


def test_the_index_is_last(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(os, "replace", lambda part, final: names.append(Path(final).name))
    with replacing(tmp_path) as new:
        for name in ("README.md", "z.png", "report.html", "a.csv"):
            (new / name).touch()
    assert names == ["a.csv", "z.png", *INDEX] and INDEX[-1] == "README.md"


def test_what_a_killed_report_has_left_is_removed_a_day_later(tmp_path):
    for name, age in ((".report-old", 2 * DAY), (".report-new", 0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (os.stat(tmp_path).st_mtime - age,) * 2)
    with replacing(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".report-new"]


def test_a_figure_that_fails_is_told_and_ends_nothing(tmp_path, monkeypatch):
    def draw(name, arms, out, suffix, *rest):
        if name == "tradeoff":
            (out / f"tradeoff{suffix}.png").touch()  # half of it
            raise ValueError("a\nsurprise\x1b")
        return stub(name, arms, out, suffix)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(figures, "draw_one", draw)
    monkeypatch.setattr(figures, "draw_across", lambda *_: 1 / 0)
    run_folder(tmp_path / "runs", "none")
    run_folder(tmp_path / "runs", "none", epochs=5)
    text = write.write(read.read_runs([tmp_path / "runs"]), tmp_path / "out").text
    told = "tradeoff of resnet8 on digits, 4 workers x 32 samples, {} epochs: ValueError: a surprise?"
    assert all(f"- {told.format(epochs)}" in text for epochs in (4, 5))
    assert "- workers: ZeroDivisionError: division by zero" in text
    assert told.format(4) in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    drawn = {path.name.partition("-")[0].removesuffix(".png") for path in (tmp_path / "out").glob("*.png")}
    assert drawn == set(figures.OF_A_SETTING) - {"tradeoff"}


def test_a_process_that_is_killed_while_it_draws_takes_no_other_figure_with_it(tmp_path, monkeypatch):
    def draw(name, arms, out, suffix, *rest):
        if name == "forest":
            os.kill(os.getpid(), signal.SIGKILL)
        return stub(name, arms, out, suffix)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(figures, "draw_one", draw)
    run_folder(tmp_path / "runs", "none")
    text = write.write(read.read_runs([tmp_path / "runs"]), tmp_path / "out").text
    assert text.count("the process that drew it was killed") == 1
    assert len(list((tmp_path / "out").glob("*.png"))) == len(figures.OF_A_SETTING) - 1


@pytest.mark.parametrize("taken", ["table.md", "out"])
def test_a_folder_that_takes_no_report_is_one_sentence(taken, tmp_path, quick, capsys):
    run_folder(tmp_path / "runs", "none")
    out = tmp_path / "out"
    if taken == "out":
        out.write_text("a file")
    else:
        (out / taken).mkdir(parents=True)
    assert report_main([str(tmp_path / "runs"), "--out", str(out)]) == 2
    _, sentence = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("--out must be a folder that can be written")
    with contextlib.suppress(NotADirectoryError):
        assert not list(out.glob(".report-*"))
    shutil.rmtree(out, ignore_errors=True)


def report_quickly(*typed: str) -> None:
    """With what takes no time, in a process that has nothing else to do."""
    with pytest.MonkeyPatch.context() as patched:
        make_quick(patched)
        assert report_main(list(typed)) == 0


def kill_reports(tmp_path: Path, times: int) -> None:
    """Whenever a report is killed: each file is the old or the new one, whole."""
    run_folder(tmp_path / "runs", "none")
    out, runs = tmp_path / "out", str(tmp_path / "runs")
    report_quickly(runs, "--out", str(out))
    old = contents(out)
    run_folder(tmp_path / "runs", "topk", accuracy=0.8)
    report_quickly(runs, "--out", str(tmp_path / "new"))
    new = contents(tmp_path / "new")
    start_forking()
    began = time.monotonic()
    assert not killed(60, report_quickly, runs, "--out", str(tmp_path / "timed"))
    longest, rng = time.monotonic() - began, random.Random(0)

    def kill_one(seconds: float) -> bool:
        """Whether it was killed before its end."""
        early = killed(seconds, report_quickly, runs, "--out", str(out))
        shown = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        assert all(content in (old.get(name), new.get(name)) for name, content in shown.items())
        assert shown["README.md"] == old["README.md"] or shown == new
        for name, content in old.items():
            (out / name).write_bytes(content)
        return early

    early = [kill_one(rng.uniform(0, longest)) for _ in range(times)]
    while not any(early):  # the first one has waited for other tests
        longest /= 2
        early.append(kill_one(longest))


def test_a_report_that_is_killed_at_some_moment(tmp_path):
    kill_reports(tmp_path, 1)


@pytest.mark.slow
def test_reports_that_are_killed_at_fifty_moments(tmp_path):
    kill_reports(tmp_path, 50)

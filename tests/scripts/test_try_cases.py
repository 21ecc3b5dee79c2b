"""A folder of cases is tried, a line each; what is wrong is told and ends with 1."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

CASES = {
    "01_right.py": "import helper, accordion_bench, os; assert os.getcwd() == helper.ROOT and os.environ['PY']",
    "02_wrong.py": "print('first'); raise SystemExit('the last line')",
    "03_right.sh": 'test -x "$PY" && "$PY" -c "import helper"',
    "04_silent.sh": "exit 3",
    "05_slow.sh": "echo waiting\nsleep 100",
    "06 with a blank.sh": "printf 'one\\rtwo\\n\\n'; exit 1",
    "helper.py": f"ROOT = {str(ROOT)!r}",
    "other.sh": "exit 1",
    "07_note.txt": "no case",
}


def tried(folder: Path, *names: str, seconds: int = 60) -> tuple[int, list[str], str]:
    environ = {**os.environ, "TIMEOUT": str(seconds)}
    done = subprocess.run(
        ["bash", "scripts/try_cases.sh", str(folder), *names], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    return done.returncode, [re.sub(r" +\d+ s +", " ", line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture
def folder(tmp_path):
    for name, text in CASES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_line_for_each_case(folder):
    (folder / "05_slow.sh").unlink()
    status, lines, _ = tried(folder)
    assert status == 1
    assert lines == [
        "ok 01_right.py",
        "FAILS 02_wrong.py: the last line",
        "ok 03_right.sh",
        "FAILS 04_silent.sh: exit status 3",
        "FAILS 06 with a blank.sh: two",
        "3 of 5 fail",
    ]


def test_some_of_them(folder):
    assert tried(folder, "01", "03_r") == (0, ["ok 01_right.py", "ok 03_right.sh", "0 of 2 fail"], "")


def test_one_that_does_not_end(folder):
    assert tried(folder, "05", seconds=1)[:2] == (
        1,
        ["FAILS 05_slow.sh: not over after 1 s; waiting", "1 of 1 fail"],
    )


def test_no_cases(tmp_path):
    assert tried(tmp_path)[0] == tried(tmp_path / "nowhere")[0] == 2
    assert "FOLDER must hold cases" in tried(tmp_path)[2] and "FOLDER must be a folder" in tried(tmp_path / "x")[2]

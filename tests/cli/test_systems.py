"""Linux and macOS, and a sentence elsewhere: what only Linux has is asked for, never taken for granted."""

import ast
import os
import sys
from pathlib import Path

import pytest

from accordion_bench.__main__ import main
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.processes import environment, waiting
from accordion_bench.runs import folder

# calls of the standard library that macOS lacks, by the modules that ask before they call
LINUX = {"sched_getaffinity", "sched_setaffinity", "prctl", "setns", "unshare", "eventfd", "memfd_create"}
ASKS = {
    "processes/environment.py": "hasattr",
    "advising/cluster.py": "hasattr",
    "report/parallel.py": 'sys.platform == "linux"',
    "netlab/hosts.py": 'platform.system() != "Linux"',
}


def test_windows_is_told_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "accordion_bench must run on Linux or macOS, got Windows; run it inside WSL 2\n"


def test_what_linux_alone_has_is_asked_for():
    found = {}
    for file in package_dir().rglob("*.py"):
        tree = ast.parse(file.read_text())
        if any(isinstance(node, ast.Attribute) and node.attr in LINUX for node in ast.walk(tree)):
            found[file.relative_to(package_dir()).as_posix()] = file.read_text()
    assert found.keys() == ASKS.keys()
    assert all(ASKS[path] in text for path, text in found.items())


def test_a_machine_that_tells_less(monkeypatch):
    """As macOS: no affinity, no /proc; and no load average."""

    def no_load():
        raise OSError("load averages are unobtainable")

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "getloadavg", no_load)
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a, **k: real(Path("/none") if str(self).startswith("/proc") else self, *a, **k)
    )
    assert environment.cores() == os.cpu_count()
    about = folder.environment()
    assert about["load"] is None and about["cpu_cores"] == os.cpu_count()
    assert waiting.process_space() == ""

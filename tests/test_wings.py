"""The package's root imports nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import accordion_bench

ROOT = Path(accordion_bench.__file__).parents[1]


def printed(script, *arguments):
    """The words that a fresh process prints."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


class TestRoot:
    def test_imports_nothing(self):
        version, *modules = printed("import sys, accordion_bench as bench; print(bench.__version__, *sys.modules)")
        assert version == accordion_bench.__version__
        assert [module for module in modules if module.startswith(("accordion_bench.", "torch"))] == []

    def test_a_submodule_is_imported_when_asked_for(self):
        asked = printed("import accordion_bench as bench; print(bench.compressors.__name__, 'sync' in dir(bench))")
        assert asked == ["accordion_bench.compressors", "True"]

    def test_an_unknown_name(self):
        with pytest.raises(AttributeError, match="no attribute 'powersdg'"):
            _ = accordion_bench.powersdg

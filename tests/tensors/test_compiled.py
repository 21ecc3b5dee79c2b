"""How kernels are compiled, and where their machine code is kept."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from accordion_bench.tensors import kernels

if not kernels.installed():
    pytest.skip("numba is not installed", allow_module_level=True)

import numba

from accordion_bench.tensors.kernels import compiled


def test_the_name_of_machine_code_says_of_which_sources_it_is(tmp_path):
    """A change in a file that a kernel only takes something from is a change of the kernel, too."""
    sources = Path(compiled.__file__).parents[1]
    assert compiled.digest(sources) in compiled.array_at.py_func.__qualname__
    copy = shutil.copytree(sources, tmp_path / "tensors")
    (copy / "kernels" / "a_part.py").write_text("TABLE = (1, 2)\n")
    before = compiled.digest(copy)
    compiled.digest.cache_clear()
    (copy / "kernels" / "a_part.py").write_text("TABLE = (1, 3)\n")
    assert compiled.digest(copy) != before != compiled.digest(sources)


def test_where_no_folder_can_be_written_kernels_are_compiled_all_the_same(monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setattr(numba.config, "CACHE_DIR", f"{__file__}/folder")

    def twice(x):
        for i in range(x.size):
            x[i] *= np.float32(2)

    x = np.ones(3, np.float32)
    compiled.compiled(twice)(x)
    assert x.tolist() == [2, 2, 2]

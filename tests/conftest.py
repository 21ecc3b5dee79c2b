"""One thread per process: the tests share the machine with the processes that they start."""

import contextlib
import gc
import importlib
import itertools
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from accordion_bench.options import conf_dir, instantiate
from tests.kit.own_parts import inside  # noqa: F401

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose children would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # below nohup, where no terminal's end would be heard
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
gc.disable()  # nothing of what is collected goes before the end


def pytest_configure(config):
    """GPUs are hidden unless `-m` asks for the tests of one: the others, and what they start, would train there."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen when Triton is imported, whoever does that first


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Of several processes, each imports another part of the tests first.

    In a fresh checkout each file is then compiled by one of them, and the others read what it has written.
    """
    config = session.config
    tests = Path(__file__).parent
    if not hasattr(config, "workerinput") or [(config.rootpath / given).resolve() for given in config.args] != [tests]:
        return
    files = sorted(tests.rglob("test_*.py"))
    part = len(files) // config.workerinput["workercount"] * int(config.workerinput["workerid"].removeprefix("gw"))
    for file in files[part:] + files[:part]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told where it is collected
            importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def pytest_collection_finish():
    """Thousands of tests and all that they have imported need not be looked at again and again."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """What ends with the process is counted again."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items):
    """Of the cases of a test that is marked `sample(n)`, the first and every n-th after it are in the default suite.

    Let n have no factor in common with the numbers of values of its parameters, so that cases differ in each of them.
    """
    for _, cases in itertools.groupby(items, key=lambda item: (item.path, getattr(item, "originalname", item.name))):
        for number, item in enumerate(cases):
            marked = item.get_closest_marker("sample")
            if marked and number % marked.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def nothing_added_by_other_tests():
    """What one test adds by --config-dir no other one looks into; what it trusts no other one trusts."""
    folders, classes = list(conf_dir._own), set(instantiate._added)
    yield
    conf_dir._own[:] = folders
    instantiate._added.intersection_update(classes)


@pytest.fixture(autouse=True)
def same_draws():
    """What a test draws without a generator of its own is the same each time."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def cells_are_composed_once():
    """Before a sweep Hydra composes all of its cells, only to see whether it can; each is composed again to be run."""
    from hydra.plugins.sweeper import Sweeper

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sweeper, "validate_batch_is_legal", lambda sweeper, batch: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def what_is_frozen_stays_frozen():
    """After `gc.unfreeze` in the product, each collection would go through everything that the tests have imported."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk():
    """Tests do not survive a power cut; that files are synchronised is a test of its own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield

"""Settings and fixtures of all tests: one thread per process, hidden GPUs, sampled cases, and isolated global state."""

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
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job: children would ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup: children would ignore the end of a terminal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
gc.disable()  # objects created during collection live until the end


def pytest_configure(config):
    """Hide GPUs unless `-m` selects GPU tests, because all other tests and their processes would train on them."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when it is imported


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
    """Exclude thousands of collected tests and their imports from garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """Include these objects in garbage collection again."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before slow tests are deselected
def pytest_collection_modifyitems(items):
    """Keep the first and every n-th further case of a test marked `sample(n)` in the default suite; mark others slow.

    Choose n without a common factor with the numbers of values of the parameters, so that the kept cases vary in each.
    """
    for _, cases in itertools.groupby(items, key=lambda item: (item.path, getattr(item, "originalname", item.name))):
        for number, item in enumerate(cases):
            marked = item.get_closest_marker("sample")
            if marked and number % marked.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def nothing_added_by_other_tests():
    """Remove the folders and trusted classes that a test has added by --config-dir."""
    folders, classes = list(conf_dir._own), set(instantiate._added)
    yield
    conf_dir._own[:] = folders
    instantiate._added.intersection_update(classes)


@pytest.fixture(autouse=True)
def same_draws():
    """Seed torch's global generators before each test.

    Without a GPU, `torch.manual_seed` would format the stack for each kind of device, which takes a millisecond.
    """
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def cells_are_composed_once():
    """Skip Hydra's check that composes all cells before a sweep; each cell is composed again to be run."""
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
    """Disable fsync for speed; a separate test checks that files are synchronised."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield

"""Processes for tests in which starting them is not what is tested: forked by a server that has imported everything.

A spawned process imports torch, which takes two seconds; one that is forked from the test's own process cannot compute
gradients any more, since autograd has run there.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["accordion_bench.launch", "accordion_bench.trainer", "tests.local"])


def _within(environ: dict[str, str], target: Callable, args: tuple) -> None:
    os.environ.clear()
    os.environ.update(environ)
    target(*args)


class _Forked:
    """What is used of a context of multiprocessing; children get the environment of now, not the server's."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def Process(self, target: Callable, args: tuple = (), **options: Any) -> Any:
        return _server.Process(target=_within, args=(dict(os.environ), target, args), **options)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Whoever asks for spawned processes gets forked ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(multiprocessing, "get_context", lambda kind: _Forked())
        yield

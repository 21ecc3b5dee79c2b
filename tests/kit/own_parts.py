"""Fixture that makes the example of own parts the current folder."""

import sys
from collections.abc import Iterator

import pytest

from tests.kit.paths import ROOT

EXAMPLE = ROOT / "examples" / "own_parts"


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the example the current folder, and its module importable."""
    from accordion_bench.cli import smoke
    from accordion_bench.methods import compatibility
    from accordion_bench.options import advice, conf_dir

    cached = (
        *(advice.experiments, advice.known_keys, advice.keys_of),
        *(smoke.names, smoke._node, compatibility.knobs),
    )
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(conf_dir, "_own", [])
    for kept in cached:
        kept.cache_clear()
    yield
    for kept in cached:
        kept.cache_clear()
    sys.modules.pop("mine", None)

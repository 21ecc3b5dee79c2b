"""The preset that looks for a learning rate: what it needs, and that a rate that diverges does not end it."""

import importlib.util
import math
import sys

import pytest

from accordion_bench import __main__ as command
from accordion_bench.cli import sweep
from tests.kit import tiny

HERE = importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") if importlib.util.find_spec("optuna") else None


def status(monkeypatch, *typed: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["accordion_bench", *typed])
    try:
        command.main()
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.skipif(HERE is not None, reason="the extra optuna is installed")
def test_without_the_extra(monkeypatch, capsys):
    assert status(monkeypatch, "+search=rate", "compressor=topk") == 2
    assert capsys.readouterr().err == (
        "optuna must be installed for hydra/sweeper=optuna, which +search= chooses, and is not; type pip install "
        "'accordion-bench[optuna]'\n"
    )


@pytest.mark.skipif(HERE is None, reason="needs the extra optuna")
def test_it_goes_on_where_a_rate_diverges(monkeypatch, tmp_path):
    typed = [item for item in tiny.typed(tmp_path, "epochs=1") if not item.startswith("optimizer.lr")]
    found = ["hydra.sweeper.params={optimizer.lr:'choice(1e30,0.02)'}", "hydra.sweeper.n_trials=4"]
    assert status(monkeypatch, "+search=rate", *typed, *found) == 2
    assert "optimizer.lr: 0.02" in (tmp_path / ".multirun" / "optimization_results.yaml").read_text()


@pytest.mark.parametrize("direction, worst", [("maximize", -math.inf), ("minimize", math.inf)])
def test_a_cell_that_failed_is_the_worst(direction, worst):
    assert sweep.metric_for_search({"direction": direction}, math.nan) == worst
    assert sweep.metric_for_search({"direction": direction}, 0.5) == 0.5
    assert math.isnan(sweep.metric_for_search({}, math.nan))

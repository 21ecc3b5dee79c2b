"""The kill loop: runs end as undisturbed ones do, whoever of their workers is killed or stopped."""

import sys
import time
from pathlib import Path

import pytest

from accordion_bench.options.checks import ConfigError
from scripts import kill_loop


@pytest.mark.slow
@pytest.mark.parametrize("scheme", list(kill_loop.SCHEMES))
def test_a_run_ends_although_workers_are_killed(scheme: str, capsys: pytest.CaptureFixture) -> None:
    """It ends well, nothing is left over, and its loss is near that of the undisturbed run."""
    assert kill_loop.main([scheme, "--mtbf", "8", "--minutes", "4", "--epochs", "12"]) == 0
    said = capsys.readouterr().out
    assert f"{scheme}: status 0" in said and "0 processes left over" in said


def test_the_command_is_ended_after_its_time(tmp_path: Path) -> None:
    """A run that never ends has failed, and nothing of it is left over."""
    began = time.monotonic()
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    outcome = kill_loop.disturbed(line, tmp_path, kill_loop.Disturbance(), 1.0)
    assert outcome.status == -9 and time.monotonic() - began < 60
    assert outcome.orphans == [] and outcome.rows == [] and not outcome.ends


def test_an_unknown_scheme_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        kill_loop.main(["diloco", "dilocoo"])
    assert capsys.readouterr().err.endswith(f"SCHEME must be one of {', '.join(kill_loop.SCHEMES)}, got dilocoo\n")


def test_links_are_not_cut_without_namespaces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """One sentence, before anything is run."""

    def refuse() -> None:
        raise ConfigError("netlab must run as root, got user 1; type sudo and the same command")

    monkeypatch.setattr(kill_loop.netlab, "refuse", refuse)
    assert kill_loop.main(["diloco", "--ends", "kill", "cut"]) == 2
    assert capsys.readouterr().err == (
        "--ends cut needs network namespaces: netlab must run as root, got user 1; type sudo and the same command; "
        "leave cut out\n"
    )

"""How far a report is: a bar where a terminal can draw one, lines elsewhere, nothing where it is quick."""

import pytest

from accordion_bench.report import parallel
from tests.kit.terminal import Terminal


def drawn(monkeypatch, term: str) -> str:
    """What a terminal gets while four things take ten seconds each, by a clock that is set."""
    now = [0.0]
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(parallel.time, "monotonic", lambda: now[0])
    terminal = Terminal(80)
    with open(terminal.descriptor, "w", closefd=False) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        for _ in parallel.told(range(4), 4, "drawing"):
            now[0] += 10
    terminal.close()
    return terminal.drawn


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch):
    assert drawn(monkeypatch, "dumb") == "".join(f"drawing: {done} of 4\r\n" for done in (1, 2, 3, 4))


def test_another_one_gets_a_bar_that_goes(monkeypatch):
    assert "\n" not in drawn(monkeypatch, "xterm")


@pytest.mark.parametrize("seconds, lines", [(0.1, 0), (5.0, 2)])
def test_elsewhere_nothing_is_said_of_what_is_quick(seconds, lines, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(parallel.time, "monotonic", lambda: now[0])
    for _ in parallel.told(range(4), 4, "reading"):
        now[0] += seconds
    said = capsys.readouterr().err
    assert said.count("\n") == lines and "\r" not in said

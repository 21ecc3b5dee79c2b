"""What benches share: who takes which turn, numbers over rounds, and tables."""

import json

import pytest

from scripts.bench import harness


def test_all_arms_take_a_turn_in_each_round_and_the_order_alternates():
    turns = []
    found = harness.in_rounds("abc", 3, lambda arm: turns.append(arm) or len(turns))
    assert "".join(turns) == "cba" + "abc" + "cba"
    assert found == {"a": [3, 4, 9], "b": [2, 5, 8], "c": [1, 6, 7]}


def test_seconds_are_those_of_one_call_after_a_warm_up():
    now, calls = [0.0], {"slow": 0, "fast": 0}

    def arm(name, seconds):
        def run():
            calls[name] += 1
            now[0] += seconds

        return run

    arms = {"slow": arm("slow", 3.0), "fast": arm("fast", 0.5)}
    times = harness.interleaved(arms, rounds=2, steps=4, clock=lambda: now[0])
    assert times == {"slow": [3.0, 3.0], "fast": [0.5, 0.5]}
    assert calls == {"slow": harness.WARM_UP + 8, "fast": harness.WARM_UP + 8}


def test_a_ratio_is_taken_round_by_round():
    assert harness.ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == (3.0, 2.5, 3.5)
    assert harness.ratio([8.0], [1.0], factor=4) == (2.0, 2.0, 2.0)
    low, high = harness.interval([1.0, 1.0, 1.0])
    assert (low, high) == (1.0, 1.0)
    assert harness.interval([1.0, 2.0, 3.0, 4.0]) == harness.interval([1.0, 2.0, 3.0, 4.0])
    assert harness.spread(1.0, 0.5, 2) == "1.000 (0.500 to 2.000)"


def test_a_line_says_whether_its_target_is_met(capsys):
    times = {"ours": [1.0, 1.0], "theirs": [1.0, 1.0]}
    harness.print_head("what", "setting")
    harness.row("a", "b", times, ("ours", "theirs"), 1.05)
    harness.line("a", "b", "", 2.0, 1.5, " s")
    assert capsys.readouterr().out.splitlines() == [
        "| what | setting |",
        "|---|---|",
        "| a | b | 1000.00 ms | 1.000 (1.000 to 1.000) | 1.05 | yes |",
        "| a | b |  | 2.000 s | 1.5 s | NO |",
    ]


def test_one_round_is_refused_where_quartiles_need_two(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "--rounds", "1"])
    with pytest.raises(SystemExit):
        harness.run_benches({}, None, rounds=9)
    assert "--rounds must be at least 2, quartiles need them, got 1; type --rounds 2" in capsys.readouterr().err


def test_what_is_saved_is_the_page_and_its_numbers(tmp_path):
    harness.save(tmp_path / "new", "# Page", "rounds.json", {"a": [1.5]})
    assert (tmp_path / "new/README.md").read_text() == "# Page\n"
    assert json.loads((tmp_path / "new/rounds.json").read_text()) == {"a": [1.5]}

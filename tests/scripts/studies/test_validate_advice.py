"""Validation of the advice: what is typed, what goes on where it was stopped, and what is computed of both sides."""

import json
import math
from dataclasses import asdict

import pytest

from accordion_bench.network.collective_costs import KINDS
from accordion_bench.network.links import LinkCost, MeasuredLink, write_measured_link
from accordion_bench.options.checks import ConfigError
from scripts.packed import write_packed
from scripts.studies import (
    advice_break_even,
    advice_cells,
    advice_compare,
    advice_measure,
    advice_trial,
    validate_advice,
)
from scripts.studies.advice_cells import ALONE, ARMS, CELL, LOCAL, MODELS
from tests.advising import made_up_costs
from tests.kit import composed

ABOUT = {
    "commit": "0123456789",
    "started": "2026-01-01T00:00:00Z",
    "python": "3.11",
    "versions": {"torch": "2.15.0"},
    "processor": "one",
    "cpu_cores": 2,
    "threads": 1,
    "load": 0.0,
}
PARTS = dict.fromkeys(advice_compare.PARTS, 0.01)


def cell(arms: dict[str, float], **key) -> dict:
    """A measured cell with three equal rounds."""
    key = {"model": "lstm", "hosts": 2, "rate": "50mbit", **key}
    return {
        **key,
        "about": ABOUT,
        "arms": {name: {"seconds": [took] * 3, "parts": PARTS} for name, took in arms.items()},
    }


def foretold(arms: dict[str, float], **key) -> list[dict]:
    """The rows of a predicted cell."""
    key = {"model": "lstm", "hosts": 2, "rate": "50mbit", **key}
    numbers = lambda took: {"seconds": took, "low": 0.9 * took, "high": 1.1 * took}  # noqa: E731
    return [{**key, "arm": name, **numbers(took), "parts": PARTS} for name, took in arms.items()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", MODELS)
def test_every_arm_is_a_configuration(model):
    for name, overrides in ARMS.items():
        hosts = [] if name == ALONE else ["comm=gloo", "comm.processes=4"]
        found = composed.validated(composed.cfg(*MODELS[model], *overrides, *hosts))
        assert (found is not None) and advice_cells.period(name) == (8 if name in LOCAL else 1)


# ---- files


def test_a_cell_is_kept_in_the_place_of_its_older_self(tmp_path):
    file = tmp_path / "new" / "measured.json.xz"
    assert advice_cells.read(file) == []
    for took in (1.0, 2.0, 1 / 3):
        advice_cells.keep(file, cell({"dense": took}), CELL)
        advice_cells.keep(file, cell({"dense": took}, hosts=3), CELL)
    assert [one["hosts"] for one in advice_cells.read(file)] == [2, 3]
    assert advice_cells.find(advice_cells.read(file), hosts=3)["arms"]["dense"]["seconds"][0] == 0.333333
    assert not list(file.parent.glob("*.part"))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", None])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    file = tmp_path / "measured.json.xz"
    if text is None:
        file.write_text('{"rows": []}')  # not compressed
    else:
        write_packed(file, text)
    with pytest.raises(ConfigError, match=r"measured.json.xz must be a file of cells, got something else; type"):
        advice_cells.read(file)


def test_finished_cells_are_left_out():
    wanted = [{"model": "lstm", "hosts": hosts, "rate": "50mbit"} for hosts in (2, 3, 4)]
    done = [cell({"dense": 1.0, "bf16": 1.0}), cell({"dense": 1.0}, hosts=3)]
    left = advice_measure.missing(done, wanted, ["dense", "bf16"])
    assert [one["hosts"] for one in left] == [3, 4]
    assert advice_measure.missing(done, wanted[:2], ["dense"]) == []


def test_measuring_goes_on_where_it_was_killed(tmp_path, monkeypatch, capsys):
    launched = []

    def measured(work, hosts, rate):
        launched.append((work.model, hosts, rate))
        if len(launched) == 2:
            raise RuntimeError("killed")
        return {name: {"seconds": [1.0] * 3, "parts": PARTS} for name in work.arms}

    monkeypatch.setattr(advice_measure, "measured", measured)
    typed = ["measure", "--models", "lstm", "--hosts", "2", "3", "--rates", "50mbit", "--arms", "dense", "--out"]
    args = validate_advice.parser().parse_args([*typed, str(tmp_path)])
    with pytest.raises(RuntimeError):
        args.run(args)
    args.run(args)
    args.run(args)
    assert launched == [("lstm", 2, 5e7), ("lstm", 3, 5e7), ("lstm", 3, 5e7)]
    assert [one["hosts"] for one in advice_cells.read(tmp_path / "measured.json.xz")] == [2, 3]


@pytest.mark.parametrize(
    "typed, sentence",
    [
        (["measure", "--rates", "fast"], r"--rates must be a number with kbit.*; type --rates=100mbit"),
        (["probe", "--hosts", "1"], r"--hosts must be an integer of at least 2, got 1; type --hosts=4"),
        (
            ["predict"],
            r"trial.json.xz must hold cells of trial, got none; type python -m scripts.studies.validate_advice trial",
        ),
        (["compare"], r"measured.json.xz must hold cells of measure, got none; type"),
        (["break-even"], r"trial.json.xz must hold cells of trial, got none; type"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path, typed, sentence):
    args = validate_advice.parser().parse_args([*typed, "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match=sentence):
        args.run(args)
    assert list(tmp_path.iterdir()) == []


# ---- both sides


def test_errors_are_of_medians():
    measured = cell({"dense": 1.0})
    measured["arms"]["dense"]["seconds"] = [1.0, 9.0, 2.0]
    (row,) = advice_compare.joined([measured], foretold({"dense": 1.5, "bf16": 1.0}))
    assert (row.measured, row.error) == (2.0, -0.25)
    assert advice_compare.score([row])[1:] == ["25.0 %", "0 of 1", "-25.0 %"]


def test_wrong_orders_are_of_arms_that_differ_by_a_tenth():
    took = {"dense": 1.0, "bf16": 0.95, "TopK": 0.8, "QSGD": 0.5}
    told = {"dense": 0.9, "bf16": 1.0, "TopK": 0.95, "QSGD": 0.95}
    rows = advice_compare.joined([cell(took), cell(took, hosts=3)], foretold(told) + foretold(took, hosts=3))
    wrong, pairs = advice_compare.wrong_orders(rows)
    names = {(faster.arm, slower.arm) for faster, slower in wrong}
    # alike is wrong, too; dense and bf16 are too close to ask
    assert names == {("TopK", "dense"), ("QSGD", "dense"), ("QSGD", "TopK")} and len(wrong) == 3
    assert pairs == 2 * 5


def test_causes_are_found_by_pattern(tmp_path):
    file = tmp_path / "causes.md"
    assert advice_compare.causes(file) == []
    lines = ["# Causes", "| arm | model | hosts | rate | cause |", "|---|:--|---|---|---|"]
    lines += ["| TopK | * | 2 | * | its codec |", "| * | lstm | [34] | 1gbit | three hosts on two cores |"]
    file.write_text("\n".join(lines))
    known = advice_compare.causes(file)

    def found(arm, **key):
        (row,) = advice_compare.joined([cell({arm: 1.0}, **key)], foretold({arm: 1.0}, **key))
        return advice_compare.cause(row, known)

    assert found("TopK") == "its codec"
    assert found("TopK", hosts=3) == advice_compare.UNKNOWN
    assert found("dense", hosts=4, rate="1gbit") == "three hosts on two cores"


def test_the_page_names_every_miss(tmp_path, capsys):
    took, told = (
        {ALONE: 0.5, "dense": 1.0, "DDP": 1.0, "TopK": 0.5},
        {ALONE: 0.1, "dense": 1.1, "DDP": 0.8, "TopK": 0.5},
    )
    write_packed(tmp_path / "measured.json.xz", json.dumps({"rows": [cell(took), cell(took, hosts=4)]}))
    rows = foretold(told) + foretold(took, hosts=4)
    write_packed(tmp_path / "predicted.json.xz", json.dumps({"rows": rows}))
    (tmp_path / "causes.md").write_text("| DDP | * | * | * | two buckets on the wire at once |")
    earlier = {"rows": [{**cell({"dense": 1.2, "TopK": 0.5}), "about": {"started": "2026-01-02"}}]}
    write_packed(tmp_path / "measured_earlier.json.xz", json.dumps(earlier))
    args = validate_advice.parser().parse_args(["compare", "--out", str(tmp_path)])
    args.run(args)
    page = capsys.readouterr().out
    misses = page.partition("## Misses")[2].partition("## Wrong")[0]
    assert "| DDP | lstm | 2 hosts | 50mbit | -20.0 % | - / 10.0 |" in misses and "two buckets" in misses
    assert "dense" not in misses and ALONE not in misses  # the reference is no method
    assert "| within 15% | 5 of 6 | 90% | MISSED |" in page
    assert "| median of errors' sizes | 0.0 % | 8% | met |" in page
    assert "0 of 4 pairs | none | met |" in page
    assert "| changed | 3 |" in page and "| steady | 3 |" in page
    repeated = page.partition("## The same cells measured twice")[2].partition("## Every")[0]
    assert "2026-01-02" in repeated and "| all | 2 | 10.0 % | 1 of 2 | +10.0 % |" in repeated
    assert "lstm, 4 hosts (*), 50mbit" in page and "| TopK | 500.0 (500.0 to 500.0) | 3 |" in page


def test_nothing_in_common_is_one_sentence():
    with pytest.raises(ConfigError, match=r"must have cells in common, got none; type .* predict after"):
        advice_compare.page([cell({"dense": 1.0})], foretold({"dense": 1.0}, rate="1gbit"), [])


# ---- the model


@pytest.fixture
def out(tmp_path):
    """A folder with a trial of a made-up model, and probes of two links."""
    costs = [made_up_costs.FP32, made_up_costs.SMALL, made_up_costs.LOCAL, made_up_costs.GATHERED]
    methods = dict(zip(("dense", "PowerSGD 4", "local SGD", "TopK"), costs, strict=True))
    said = {name: asdict(cost) for name, cost in methods.items()}
    trial = {
        "model": "resnet18",
        "processes": 2,
        "about": ABOUT,
        "step": asdict(made_up_costs.times()),
        "methods": said,
    }
    advice_cells.keep(tmp_path / "trial.json.xz", trial, ("model", "processes"))
    for rate in (50e6, 1e9):
        kinds = {kind: LinkCost(1e-3, 0.95 * rate, 0.01 * rate / 8, 1e-9, 0.05) for kind in KINDS}
        folder = tmp_path / "links" / f"2-hosts-{rate / 1e6:.0f}mbit"
        write_measured_link(folder / "link.json", MeasuredLink(2, 2, "gloo", "cpu", kinds), [])
    return tmp_path


def test_a_trial_comes_back_from_its_file(out):
    (trial,) = advice_cells.read(out / "trial.json.xz")
    assert advice_trial.times_from(trial["step"]) == made_up_costs.times()
    assert advice_trial.cost_from(trial["methods"]["TopK"]) == made_up_costs.GATHERED


def test_links_between_the_probed_ones(out):
    from scripts.studies.advice_predict import link_at, links

    probed = links(out, 2)
    assert sorted(probed) == [5e7, 1e9]
    for rate in probed:
        for kind, cost in link_at(rate, probed).items():
            assert cost.bandwidth == pytest.approx(0.95 * rate) and cost.burst == pytest.approx(0.01 * rate / 8)
            assert cost.latency == pytest.approx(probed[rate].kinds[kind].latency)
    assert link_at(2e8, probed)["all_reduce"].bandwidth == pytest.approx(1.9e8)
    assert link_at(1e7, probed)["all_gather"].bandwidth == pytest.approx(9.5e6)
    with pytest.raises(ConfigError, match=r"must hold a probe of 3 hosts, got none; type .* probe --hosts 3"):
        links(out, 3)


def test_every_arm_is_foretold_behind_every_probed_link(out, monkeypatch):
    from scripts.studies import advice_predict

    monkeypatch.setattr(advice_predict, "cores", lambda: 2)
    args = validate_advice.parser().parse_args(["predict", "--out", str(out)])
    args.run(args)
    rows = advice_cells.read(out / "predicted.json.xz")
    assert len(rows) == 2 * 6
    slow = {row["arm"]: row for row in rows if row["rate"] == "50mbit"}
    assert slow["DDP"]["seconds"] == slow["dense"]["seconds"]
    assert slow[ALONE]["seconds"] == pytest.approx(0.1)
    own = made_up_costs.times().compute
    assert slow["local SGD"]["seconds"] - own == pytest.approx(slow["local SGD"]["parts"]["exposed"])
    assert slow["local SGD"]["parts"]["comm"] * 8 == pytest.approx(slow["dense"]["parts"]["comm"], rel=1e-3)
    for row in rows:
        assert row["low"] <= row["seconds"] <= row["high"]


# ---- break-even


@pytest.mark.parametrize("where", [3e7, 1e8, 2.7e9])
def test_bisection_finds_a_crossing(where):
    asked = []

    def ratio(rate):
        asked.append(rate)
        return (rate / where) ** 0.3

    found = advice_break_even.crossing(ratio, 6)
    assert found.rate == pytest.approx(where, rel=1e-6) and found.low < where < found.high
    assert len(asked) == 6 and found.high / found.low == pytest.approx(1000 ** (1 / 64), rel=2e-3)


def test_some_arms_never_cross():
    assert advice_break_even.crossing(lambda rate: 0.5, 6).rate == math.inf
    assert advice_break_even.crossing(lambda rate: 1.5, 6).rate == 0
    assert [advice_break_even.mbit(rate) for rate in (None, 0.0, 3e8)] == ["above all", "below all", "300"]


def test_a_launch_is_made_once(out, monkeypatch, capsys):
    from scripts.studies import advice_predict

    monkeypatch.setattr(advice_predict, "cores", lambda: 2)
    launched = []

    def measured(work, hosts, rate):
        launched.append(rate)
        if len(launched) == 3:
            raise RuntimeError("killed")
        return {"dense": {"seconds": [1.0, 2.0, 1.0]}, "PowerSGD 4": {"seconds": [r * (rate / 3e8) for r in (1, 2, 1)]}}

    monkeypatch.setattr(advice_measure, "measured", measured)
    args = validate_advice.parser().parse_args(["break-even", "--arms", "PowerSGD 4", "--out", str(out)])
    with pytest.raises(RuntimeError):
        args.run(args)
    args.run(args)
    args.run(args)
    assert len(launched) == 7
    (row,) = advice_cells.read(out / "break_even.json.xz")
    assert row["measured"] == pytest.approx(3e8, rel=1e-5) and len(row["launches"]) == 6
    assert "| PowerSGD 4 | resnet18 | 2 | 300 (" in capsys.readouterr().out

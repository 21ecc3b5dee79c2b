"""Clock: what steps and exchanges usually take, whatever the machine does in between; in told time."""

import json
import math

import numpy as np
import pytest
import torch

from accordion_bench.comm.clock import PLANS, Clock
from accordion_bench.comm.samples import LONGEST, MOST, PARTS, Phase, Series, Steps, Usual
from accordion_bench.comm.stages import ExchangeKind, ExchangePart, InForce, Stage
from accordion_bench.network.link_model import Network, exchanges_of
from tests.kit.timed import Told

LINK = Network(1e9, 1e-4)


def modelled(told) -> dict:
    return LINK.columns(told.comm)


def run(stalled=None, steps=100, **stall) -> Told:
    """Ten epochs; the stalled step takes what is typed."""
    told = Told()
    for step in range(steps):
        told.step(**{"encode": 0.02, "decode": 0.03, **(stall if step == stalled else {})})
        if step % 10 == 9:
            told.decide()
    return told


def test_without_noise_the_model_is_the_sum_of_the_laps():
    told = run()
    columns, measured = modelled(told), told.clock.columns(True)
    assert columns["modelled_seconds"] == pytest.approx(measured["seconds"]) == pytest.approx(100 * 1.15 + 10 * 0.01)
    assert (measured["outlier_seconds_count"], measured["outlier_seconds"]) == (0, 0)
    (kind,) = exchanges_of(told.comm, True)
    assert kind.times == 100 and (kind.wait, kind.spread) == (pytest.approx(1), pytest.approx(0, abs=1e-9))
    assert kind.buckets == [Stage(pytest.approx(1), pytest.approx(0.02), pytest.approx(0.03), 0, 0)]


@pytest.mark.parametrize("part", ["compute", "encode", "decode", "update"])
@pytest.mark.parametrize("stalled", [0, 57, 99])
def test_a_stall_of_8_seconds_moves_nothing_and_is_told(part, stalled):
    usual = {"compute": 1.0, "encode": 0.02, "decode": 0.03, "update": 0.1}[part]
    told = run(stalled, **{part: usual + 8})
    measured = told.clock.columns(True)
    assert modelled(told)["modelled_seconds"] == pytest.approx(modelled(run())["modelled_seconds"], rel=0.01)
    assert measured["seconds"] == pytest.approx(run().clock.columns(True)["seconds"] + 8)
    assert (measured["outlier_seconds_count"], measured["outlier_seconds"]) == (1, pytest.approx(8))


def test_a_stall_between_steps_is_told():
    told = run()
    told.decide(5.0)
    assert modelled(told)["modelled_seconds"] == pytest.approx(modelled(run())["modelled_seconds"], rel=0.01)
    assert told.clock.steps.outliers() == (1, pytest.approx(4.99))


def test_what_is_rare_by_intent_is_counted():
    """A local method's averaging in every fourth step, a larger batch, the smaller last batch of an epoch."""
    told = Told()
    for step in range(40):
        averages = step % 4 == 3
        told.step(exchanges=averages, update=0.5 if averages else 0.1)
    for _ in range(5):
        told.step(4.0, samples=128, exchanges=False)
    told.step(0.5, samples=16, exchanges=False)
    assert modelled(told)["modelled_seconds"] == pytest.approx(told.clock.columns(True)["seconds"])
    assert told.clock.steps.usual() == [
        Usual("compute", 32, 40, pytest.approx(1.0)),
        Usual("compute", 128, 5, pytest.approx(4.0)),
        Usual("compute", 16, 1, pytest.approx(0.5)),
        Usual("update", (), 36, pytest.approx(0.1)),
        Usual("update", ("gradient-1",), 10, pytest.approx(0.5)),
    ]
    assert told.clock.steps.outliers() == (0, 0)


def test_exchanges_under_different_plans_are_not_mixed():
    told = Told()
    for step in range(30):
        told.step(encode=0.5 if step < 10 else 0.1, payload=4000 if step < 10 else 1000)
    for _ in range(10):
        told.step(compute=2.0, samples=64)
    found = [(kind.times, kind.wait, kind.buckets[0].encode) for kind in exchanges_of(told.comm, True)]
    assert found == [
        (10, *map(pytest.approx, (1, 0.5))),
        (20, *map(pytest.approx, (1, 0.1))),
        (10, pytest.approx(2), 0),
    ]
    exposed = modelled(told)["modelled_exposed_seconds"]
    assert exposed == pytest.approx(10 * 0.5 + 20 * 0.1)


def test_very_many_plans_count_as_the_nearest_of_the_first_ones():
    clock = Told().clock
    for payload in range(1000, 1000 + PLANS):
        clock.in_force(32, payload)
    for plan, nearest in (((32, 5), 1000), ((32, 9999), 1000 + PLANS - 1), ((33, 1003), 1003)):
        clock.in_force(*plan)
        assert clock.plan == InForce(32, nearest)


def test_a_long_series_is_thinned_evenly():
    series = Series()
    for number in range(10 * MOST):
        series.add(number)
    assert series.count == 10 * MOST and MOST // 2 <= len(series.values) < MOST
    assert set(torch.tensor(series.values).diff().tolist()) == {series.stride}
    assert series.median() == pytest.approx(5 * MOST, rel=0.01)
    again = Series.from_state(series.state_dict())
    for one in (series, again):
        one.add(1.0)
    assert again.state_dict()["values"].equal(series.state_dict()["values"]) and again.count == series.count


def test_the_spread_of_normal_steps_is_their_deviation():
    draws = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert Series(draws.tolist()).deviation() == pytest.approx(1, abs=0.1)
    stalled, slower = draws.clone(), draws.clone()
    stalled[::50] = 8000
    slower[500:] += 100
    for noisy in (stalled, slower):
        assert Series(noisy.tolist()).deviation() == pytest.approx(1, abs=0.1)
    assert Series().deviation() == Series([5.0]).deviation() == 0


def test_the_short_last_batch_of_an_epoch_is_no_spread():
    """Two steps an epoch, of 32 samples and of 4: all take as long as they should."""
    told = Told()
    for _ in range(10):
        told.step(compute=1.0)
        told.step(compute=0.2, samples=4, batch=32)
    (kind,) = exchanges_of(told.comm, True)
    assert (kind.times, kind.spread) == (20, pytest.approx(0))
    assert Series([1.0, 0.2] * 10).deviation() > 0.8


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """Half of a run, saved, loaded and continued, is the whole run."""
    whole, first, rest = run(57, compute=9.0), run(steps=50), Told()
    torch.save(first.clock.state_dict(), tmp_path / "state.pt")
    rest.clock.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(50, 100):
        rest.step(encode=0.02, decode=0.03, compute=9.0 if step == 57 else 1.0)
        if step % 10 == 9:
            rest.decide()
    for columns in (modelled, lambda told: told.clock.columns(True)):
        now, then = columns(rest), columns(whole)
        assert all(now[key] == pytest.approx(then[key]) for key in now if isinstance(now[key], float | int))
    assert rest.clock.steps.phases.keys() == whole.clock.steps.phases.keys()


def test_checkpoints_spell_parts_of_exchanges():
    kind = ExchangeKind("mean gradient", 4, InForce(32, 1000))
    for part, name in (
        (ExchangePart(kind, "wait"), "mean gradient-4@32x1000.wait"),
        (ExchangePart(kind._replace(plan=None), "ready", 10), "mean gradient-4.10.ready"),
    ):
        assert part.name == name and ExchangePart.named(name) == part


def test_phases_are_json():
    told = run(steps=10)
    assert json.loads(json.dumps(modelled(told)["seconds_by_phase"])) == [
        ["compute", 32, 10, pytest.approx(1.0)],
        ["update", ["gradient-1"], 10, pytest.approx(0.1)],
        ["policy", ["end of epoch"], 1, pytest.approx(0.01)],
    ]


def test_the_first_step_is_on_no_clock():
    clock = Clock(torch.device("cpu"))
    clock.lap("compute")
    clock.event("exchange")
    clock.step_over(32)
    assert clock.steps.usual() == [] and clock.columns(True)["seconds"] == 0


class Event(float):
    """A point in a device's queue, which is read later."""

    def elapsed_time(self, end):
        return 1000 * (end - self)

    def query(self):
        return True


def test_events_that_are_read_once_an_epoch_say_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    whole, late = run(57, compute=9.0), Told()
    late.clock.cuda = True
    late.clock.mark = lambda: Event(late.now)
    late.clock.start()
    for step in range(100):
        late.step(encode=0.02, decode=0.03, compute=9.0 if step == 57 else 1.0)
        if step % 10 == 9:
            late.decide()
    assert not late.clock.steps.phases
    for columns in (modelled, lambda told: told.clock.columns(True)):
        now, then = columns(late), columns(whole)
        assert all(now[key] == pytest.approx(then[key]) for key in now if isinstance(now[key], float | int))


def test_events_are_read_early_where_very_many_wait_and_are_over(monkeypatch):
    monkeypatch.setattr("accordion_bench.comm.clock.UNREAD", 200)
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    late, whole = Told(), Told()
    late.clock.cuda = True
    late.clock.mark = lambda: Event(late.now)
    late.clock.start()
    longest = 0
    for _ in range(300):
        for told in (late, whole):
            told.step(encode=0.02, decode=0.03, compute=1.0)
        longest = max(longest, len(late.clock._spans))
    assert longest <= 200 and not waits
    assert late.clock.columns(True) == pytest.approx(whole.clock.columns(True))


class Queued(Event):
    """A point in a device's queue, which the device has not reached yet where it lags behind."""

    reached = float("inf")

    def query(self):
        return self <= Queued.reached

    def elapsed_time(self, end):
        assert self <= end <= Queued.reached, "a GPU would raise"
        return super().elapsed_time(end)


def test_events_that_the_device_has_not_reached_wait_without_being_waited_for(monkeypatch):
    """The device lags three steps behind the host; two threads leave events."""
    monkeypatch.setattr("accordion_bench.comm.clock.UNREAD", 100)
    waits = []

    def synchronize():
        waits.append(1)
        Queued.reached = math.inf

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    late, whole = Told(), Told()
    late.clock.cuda = True
    late.clock.mark = lambda: Queued(late.now)
    late.clock.start()
    longest = 0
    for _ in range(200):
        Queued.reached = late.now - 3 * 1.15
        for told in (late, whole):
            told.step(encode=0.02, decode=0.03, compute=1.0)
        longest = max(longest, len(late.clock._spans))
    assert longest <= 101 and not waits and late.clock._spans
    assert late.clock.columns(True) == pytest.approx(whole.clock.columns(True)) and waits == [1]
    assert late.clock.steps.usual() == whole.clock.steps.usual()


def test_what_is_kept_of_very_many_steps_stays_bounded_and_says_the_same():
    """Medians of every second, fourth, ... step; sums of all; outliers among the longest."""
    rng, many, all_steps = np.random.default_rng(0), Steps(), []
    for step in range(40 * MOST):
        samples = 32 if step % 10 else 8
        compute = (1.0 if samples == 32 else 0.3) * rng.uniform(0.9, 1.1) + (8.0 if step % 997 == 0 else 0.0)
        many.add(Phase(samples, ("gradient-4",)), {"compute": compute, "update": 0.1, "exposed": 0.2})
        all_steps.append((samples, compute))
    kept = sum(len(alike.rows) // len(PARTS) + len(alike.longest) for alike in many.phases.values())
    assert kept <= 2 * (MOST + LONGEST)
    usual = {(found.part, found.phase): found for found in many.usual()}
    for samples in (32, 8):
        taken = [compute for size, compute in all_steps if size == samples]
        assert usual["compute", samples].steps == len(taken)
        assert usual["compute", samples].seconds == pytest.approx(np.median(taken), rel=0.01)
    expected = sum(compute - usual["compute", samples].seconds for samples, compute in all_steps)
    assert many.excess() == pytest.approx(expected)
    count, beyond = many.outliers()
    assert count == len(range(0, 40 * MOST, 997)) and beyond == pytest.approx(8 * count, rel=0.05)
    again = Steps()
    again.load_state_dict(many.state_dict())
    assert again.usual() == many.usual() and again.outliers() == many.outliers() and again.excess() == many.excess()


def test_times_go_on_from_the_row_of_another_process():
    """Each column is at least that of the row; those of the process itself that are higher stay."""
    clock = run().clock
    own = clock.columns(True)
    clock.raise_totals_to_row({**own, "compute_seconds": own["compute_seconds"] + 50, "policy_seconds": 0.0})
    columns = clock.columns(True)
    assert columns["compute_seconds"] == own["compute_seconds"] + 50
    assert columns["seconds"] == pytest.approx(own["seconds"] + 50)
    assert {name for name in own if columns[name] != own[name]} == {"compute_seconds", "seconds"}

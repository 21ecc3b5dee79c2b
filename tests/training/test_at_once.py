"""Workers that a GPU computes side by side: the same bits, no race between streams, and times that are honest."""

import pytest
import torch

from accordion_bench.comm import graphs as graphs_room
from accordion_bench.comm.clock import Clock
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import CudaGraphs
from accordion_bench.comm.stages import ExchangeKind, ExchangePart, InForce
from accordion_bench.conformance.placement import TapeGraphs
from accordion_bench.network.link_model import Network, exchanges_of
from tests.device.streams import StubStreams
from tests.kit.taped import pair
from tests.training.test_replayed import Drops, model

THREE = [*model(Drops), "workers_at_once=3"]


@pytest.fixture
def streams():
    found = StubStreams()
    with found.main():
        yield found


class TestOrder:
    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["micro_batch_size=2", "bn=local"],
            ["sync=local_sgd", "sync.period=3"],
            ["compressor=powersgd", "compressor.min_compression_rate=0", "optimizer=adamw"],
        ],
        ids=" ".join,
    )
    def test_the_same_bits_and_no_race(self, tmp_path, streams, overrides):
        """With dropout, BatchNorm, sampled steps in between, evaluation, and two workers in one lane."""
        with pair(tmp_path, *THREE, *overrides, workers=4, streams=streams) as both:
            both.step(14)
            assert both.same() and streams.wrong == []
            assert both.tape.replayed["workers"] > 4 * 8 and len(both.tape._lanes) == 3

    def test_a_missing_join_is_found(self, tmp_path, streams, monkeypatch):
        with pair(tmp_path, *THREE, workers=4, streams=streams) as both:
            both.step(8)
            assert streams.wrong == []
            monkeypatch.setattr(both.tape, "join", lambda: None)
            both.step(1)
        assert any("with which stream" in sentence for sentence in streams.wrong)

    def test_a_lane_that_does_not_wait_for_its_batch_is_found(self, tmp_path, streams, monkeypatch):
        with pair(tmp_path, *THREE, workers=4, streams=streams) as both:
            both.step(8)
            on, off = streams.wait, (lambda event: None)
            whole_lane = both.tape.drawing_from

            def no_wait(generator):
                monkeypatch.setattr(streams, "wait", off)
                return whole_lane(generator)

            def join():
                monkeypatch.setattr(streams, "wait", on)
                TapeGraphs.join(both.tape)

            monkeypatch.setattr(both.tape, "drawing_from", no_wait)
            monkeypatch.setattr(both.tape, "join", join)
            both.step(1)
        assert any("with which main is not done" in sentence for sentence in streams.wrong)

    def test_lanes_draw_from_generators_of_their_own(self):
        tape = TapeGraphs()
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        drawn = []
        for number in (1, 2, 1, 2):
            with tape.lane(number):
                if len(drawn) < 2:
                    torch.default_generator.manual_seed(7 + number)
                drawn.append(torch.rand(2))
        for number in (1, 2):
            own = torch.Generator().manual_seed(7 + number)
            assert torch.equal(torch.cat(drawn[number - 1 :: 2]), torch.rand(4, generator=own))
        assert torch.equal(torch.rand(3), expected)


class TestCudaCalls:
    """What is asked of torch.cuda, which is not there."""

    def test_a_capture_has_the_stream_the_pool_and_the_generator_of_its_lane(self, monkeypatch):
        calls: list[tuple] = []

        class Streams(StubStreams):
            def __init__(self, device) -> None:
                super().__init__()

        class Default:
            state = "outside"

            def graphsafe_get_state(self):
                return self.state

            def graphsafe_set_state(self, state):
                self.state = state

        class Graph:
            def replay(self):
                calls.append(("replay", default.state))

        class Capture:
            def __init__(self, graph, pool, stream, capture_error_mode):
                calls.append((pool, stream, default.state))

            def __enter__(self):
                return None

            def __exit__(self, *_):
                return None

        default, pools = Default(), iter(range(9))
        monkeypatch.setattr(graphs_room, "CudaStreams", Streams)
        monkeypatch.setattr(torch.cuda, "default_generators", [default])
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", Capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
        made = iter("ab")
        monkeypatch.setattr(CudaGraphs, "new_generator", lambda _: next(made))
        cuda = CudaGraphs(torch.device("cuda"))
        replays = []
        for number in (0, 1, 2, 1):
            with cuda.lane(number):
                replays.append(cuda.capture(lambda: None, "workers")[0])
                replays[-1]()
        captured = [call for call in calls if call[0] != "replay"]
        assert len({call[1] for call in captured}) == len({call[0] for call in captured}) == 3
        assert captured[1] == captured[3] and [call[2] for call in captured] == ["outside", "a", "b", "a"]
        assert [call[1] for call in calls if call[0] == "replay"] == ["outside", "a", "b", "a"]
        assert default.state == "outside"


class Timed:
    """A clock in told time: four workers of one second each, that take three at once; exchanges take 0.1."""

    def __init__(self, monkeypatch, at_once: bool) -> None:
        self.now = 0.0
        monkeypatch.setattr(Clock, "mark", lambda _: self.now)
        self.comm = Comm(4)
        self.clock = self.comm.clock
        self.clock.at_once, self.plan = at_once, InForce(32, 100)

    def step(self) -> None:
        clock, kind = self.clock, ExchangeKind("gradient", 4)
        clock.start()
        clock.in_force(*self.plan)
        one_by_one = clock.sampled or not clock.at_once
        for row in range(4):
            clock.worker()
            self.now += 1.0 if one_by_one else 0.0
            if row == 3:
                clock.ready(0)
            clock.lap("compute")
        self.now += 0.0 if one_by_one else 3.0
        clock.lap("compute")
        clock.waits(kind)
        with clock.exchanging(kind, 0, self.comm.ledger):
            self.now += 0.1
        clock.lap("exposed")
        clock.step_over(32)
        clock.warm = True


def test_times_of_a_worker_are_those_it_has_alone(monkeypatch):
    alone, several = Timed(monkeypatch, False), Timed(monkeypatch, True)
    for timed in (alone, several):
        monkeypatch.setattr(Clock, "mark", lambda _, timed=timed: timed.now)
        for _ in range(47):
            timed.step()
        timed.clock.read()
    a, b = (exchanges_of(timed.comm, True)[0] for timed in (alone, several))
    assert a == b and (b.wait, b.buckets[0].ready, b.spread) == (1.0, 1.0, 0.0)
    columns = [Network(1e9, 0).columns(timed.comm) for timed in (alone, several)]
    assert columns[0]["modelled_seconds"] == pytest.approx(columns[1]["modelled_seconds"])
    measured = several.clock.columns(False)
    sampled = 1 + 3  # the first warm step, then 5, 25 and 45
    assert measured["compute_seconds"] == pytest.approx(sampled * 4 + (46 - sampled) * 3)
    assert measured["overlapped_seconds"] == pytest.approx(46 - sampled)
    assert "overlapped_seconds" not in alone.clock.columns(False)
    kept = several.clock.series[ExchangePart(ExchangeKind("gradient", 4, several.plan), "ready", 0)]
    assert kept.count == 46

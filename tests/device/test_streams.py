"""Tensors between the streams of a GPU, proved without one: see `on_device.StubStreams` for the rules."""

import threading
from types import SimpleNamespace

import pytest
import torch

from accordion_bench.comm import on_device
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import CudaStreams, Streams, Transport, streams_of
from accordion_bench.compressors import powersgd
from accordion_bench.datasets.loader import Upload
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.device.streams import StubStreams
from tests.kit import composed

CPU = torch.device("cpu")
TINY = [
    *("model._target_=tests.kit.models.Plain", "~model.depth", "dataset=synthetic", "dataset.size=8", "epochs=1"),
    *("dataset.train_size=96", "dataset.test_size=8", "batch_size=4"),
    *("comm.overlap=true", "comm.bucket_cap_mb=0.00005"),
]


class WithoutEvents(StubStreams):
    """A program that forgets to wait."""

    def wait(self, event):
        pass


class WithoutKeeping(StubStreams):
    """A program that forgets that memory is in use."""

    def keep(self, tensors):
        pass


@pytest.fixture
def stub(monkeypatch):
    return stubbed(monkeypatch)


def stubbed(monkeypatch, kind=StubStreams) -> StubStreams:
    made = kind()
    monkeypatch.setattr(on_device, "streams_of", lambda device: made)
    return made


class TestRules:
    """The stub itself: else everything would pass."""

    def test_a_use_elsewhere_needs_an_event(self, stub):
        with stub.main():
            x = torch.ones(3)
            event = stub.record()
            with stub.on("other"):
                early = x + 1
                assert len(stub.wrong) == 1 and "with which main is not done" in stub.wrong[0]
                stub.wait(event)
                late = x + 1
                assert len(stub.wrong) == 1
            x.add_(1)  # while the other one may still read
            assert len(stub.wrong) == 2
        assert early.equal(late)

    def test_memory_is_freed_when_others_are_known_to_be_done(self, stub):
        with stub.main():
            for kept, awaited, wrong in ((False, False, 1), (True, False, 1), (False, True, 1)):
                x, event = torch.ones(3), stub.record()
                with stub.on("other"):
                    stub.wait(event)
                    stub.keep([x] if kept else [])
                    x.sum()
                    done = stub.record()
                if awaited:
                    stub.wait(done)
                del x
                assert len(stub.wrong) == wrong and "main frees (3,), which other may still use" in stub.wrong[0]

    def test_other_parts_of_the_same_memory_are_others(self, stub):
        with stub.main():
            rows = torch.zeros(2, 3, 4)  # two workers' tensors of equal shape, side by side
            event = stub.record()
            rows[:, 1].fill_(1)
            with stub.on("other"):
                stub.wait(event)
                rows[:, 0].sum(), rows[1, 2].sum()
                assert not stub.wrong
                rows[1].sum()
                assert len(stub.wrong) == 1

    def test_views_are_no_use_and_share_memory(self, stub):
        with stub.main():
            x, event = torch.zeros(4), stub.record()
            with stub.on("other"):
                y = x.view(2, 2)[1]
                assert not stub.wrong
                stub.wait(event)
                y.fill_(1)
            x.sum()
        assert len(stub.wrong) == 1


class TestTransport:
    def exchanged(self, stub) -> StubStreams:
        """Work that reads what was computed, changes a state, and returns something new; then all is dropped."""
        transport = Transport(CPU)
        with stub.main():
            state = [torch.zeros(5)]
            for _ in range(3):
                x = torch.ones(5)

                def work(x=x):
                    state[0] = state[0] + x
                    return [state[0] * 2]

                future = transport.submit(work, [x], lambda: state)
                del x, work
                (y,) = transport.wait(future)
                y.add_(1)
                state[0].sum()
                state[0] = state[0].clone()  # as a step that is exchanged in this thread
            del y, future
        transport.close()
        transport._thread.join(5)
        return stub

    def test_hands_over_and_back(self, stub):
        self.exchanged(stub)
        assert stub.wrong == []
        assert stub.log[:2] == [("use_device", "none", "transport"), ("new", "none", "urgent stream 1")]

    @pytest.mark.parametrize("kind", [WithoutEvents, WithoutKeeping])
    def test_what_is_forgotten_is_found(self, monkeypatch, kind):
        assert self.exchanged(stubbed(monkeypatch, kind)).wrong

    def test_a_device_that_fails_reaches_who_waits(self, monkeypatch):
        class Broken(Streams):
            def use_device(self):
                raise RuntimeError("invalid device ordinal")

        monkeypatch.setattr(on_device, "streams_of", lambda device: Broken())
        transport = Transport(CPU)
        with pytest.raises(RuntimeError, match="ordinal"):
            transport.wait(transport.submit(list))


def trained(tmp_path, stub, *overrides, workers=1, steps=5, late=False) -> Trainer:
    """Some steps; in every other one somebody looks at the gradients first, so that the main thread exchanges them.

    In between the state is read, as a checkpoint does.
    """
    with stub.main():
        config = RunConfig.from_dict(composed.cfg(*TINY, *overrides))
        trainer = Trainer(config, Comm(workers), RunFolder(tmp_path))
        trainer.runner.finite.late = late
        trainer.policy_runner.looks = lambda: trainer.position.step % 2 == 1
        trainer.begin_epoch()
        for _ in range(steps):
            trainer.train_step()
            trainer.sync.land()
            for owner in trainer.owners.of_all:
                owner.state_dict()
            trainer.owners.of_each[2].worker_state(0)
    trainer.comm.transport.close()
    trainer.comm.transport._thread.join(5)
    assert any("urgent stream" in stream for what, stream, _ in stub.log if what == "use")
    assert len(trainer.exchange.buckets) > 1
    return trainer


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "overrides",
    [
        ["compressor=powersgd", "compressor.min_compression_rate=0"],
        ["compressor=none"],
        ["compressor=efsignsgd"],
        ["compressor=distefblocksgd"],
        ["compressor=dgc", "optimizer.momentum=0"],
        ["compressor=topk"],
        ["compressor=powersgd", "sync=post_local_sgd", "sync.switch_step=3", "sync.period=1"],
        ["compressor=topk", "sync=overlap_local_sgd", "sync.period=2", "sync.delay=1"],
        ["compressor=demo", "optimizer.momentum=0"],
        ["compressor=signum", "optimizer.momentum=0"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("late", [False, True])
def test_a_run_has_no_race(tmp_path, stub, overrides, late):
    trained(tmp_path, stub, *overrides, late=late)
    assert stub.wrong == []


def test_rows_of_workers_have_no_race(tmp_path, stub):
    trained(tmp_path, stub, "compressor=powersgd", "compressor.min_compression_rate=0", workers=2, late=True)
    assert stub.wrong == []


def replaces(state, queries):
    """As it was: a new Q takes the place of the one before, which another stream may still read."""
    for name, q in queries.items():
        state.setdefault(name, {})["q"] = q.clone()


def test_a_query_that_is_replaced_was_a_race(tmp_path, stub, monkeypatch):
    """Without the state in the hand-over, which is safe for any compressor, also where a rank changes."""
    options = ["compressor=powersgd", "compressor.min_compression_rate=0"]
    monkeypatch.setattr(powersgd, "keep_queries", replaces)
    trained(tmp_path, stub, *options)
    assert stub.wrong == []
    monkeypatch.setattr(Exchange, "state_of", lambda self, number: ())
    trained(tmp_path, stub, *options)
    assert any(told.startswith("main frees") and "urgent stream" in told for told in stub.wrong)


@pytest.mark.parametrize("kind", [WithoutEvents, WithoutKeeping])
def test_a_run_that_forgets_is_found(tmp_path, monkeypatch, kind):
    forgets = stubbed(monkeypatch, kind)
    trained(tmp_path, forgets, "compressor=powersgd", "compressor.min_compression_rate=0", steps=3)
    assert forgets.wrong


class TestUpload:
    def batches(self, stub) -> list[torch.Tensor]:
        upload = Upload(CPU)
        upload.send = sent_by_copies(upload)
        found, hosts = [], [torch.arange(3), *(torch.arange(3) + number for number in range(3))]
        with stub.main():
            ahead = upload.send((hosts[0],))
            for number in range(3):
                (x,) = upload.receive(ahead)
                ahead = upload.send((hosts[number + 1],))
                found.append(x * 2)
                del x
        return found

    def test_batches_are_copied_on_a_stream_of_their_own(self, stub):
        assert [x.tolist() for x in self.batches(stub)] == [[0, 2, 4], [0, 2, 4], [2, 4, 6]]
        assert stub.wrong == [] and any(stream == "stream 1" for what, stream, _ in stub.log if what == "use")

    @pytest.mark.parametrize("kind", [WithoutEvents, WithoutKeeping])
    def test_what_is_forgotten_is_found(self, monkeypatch, kind):
        forgets = stubbed(monkeypatch, kind)
        self.batches(forgets)
        assert forgets.wrong


def sent_by_copies(upload):
    """`to` copies nothing to where a tensor is; a GPU is elsewhere."""
    send = upload.send

    def sent(tensors):
        with upload.streams.on(upload._stream):
            copies = tuple(x.clone() for x in tensors)
        return send(copies)

    return sent


def test_a_cpu_has_no_streams():
    assert type(streams_of(CPU)) is Streams and streams_of(CPU).record() is None
    never = (1 / 0 for _ in "x")
    streams_of(CPU).keep(never)


def test_a_gpu_is_chosen_in_the_thread_and_its_stream_goes_first(monkeypatch):
    """Else every process would open a context on the first GPU."""
    told = []

    def stream(device, priority):
        told.append(("stream", str(device), priority))
        return SimpleNamespace(device=device)

    def set_device(device):
        told.append(("device", str(device), threading.current_thread().name))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    device = torch.device("cuda:3")
    assert type(streams_of(device)) is CudaStreams
    transport = Transport(device)
    transport.close()
    transport._thread.join(5)
    assert told == [("device", "cuda:3", "transport"), ("stream", "cuda:3", -1)]

"""Numbers of the host on a device: uploaded at once, or cells of work that is captured."""

import torch

from accordion_bench.codecs.bucket import Bucket, Context, pattern, rates_of
from accordion_bench.conformance.pretend_device import DEVICE, pretended, real
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.upload import capture_uploads, filled, fresh, table, tables, upload

SPECS = [TensorSpec(name, (2, 3)) for name in "abc"]


def context(step: int, *lrs: float) -> Context:
    return Context(step, SPECS, [1.0] * 3, 0, lrs)


def test_on_a_cpu_nothing_moves():
    x = torch.arange(3.0)
    with capture_uploads() as cells:
        assert upload(x, torch.device("cpu")) is x
        assert fresh(lambda moment: x + moment, 2, torch.device("cpu")).tolist() == [2, 3, 4]
    assert cells == []


def test_captured_work_is_given_cells_that_are_filled_before_each_replay():
    with pretended() as counts:
        assert upload(torch.ones(2), DEVICE).cpu().tolist() == [1, 1]
        with capture_uploads() as cells:
            counts.reset()
            fixed = upload(torch.tensor([5.0, 6.0]), DEVICE)
            moving = fresh(lambda moment: torch.tensor([moment, 2.0 * moment]), 1, DEVICE)
            assert counts.uploads == 0 and len(cells) == 2
        seen, uploads = [], []
        for moment in (3, 7):
            counts.reset()
            filled(cells, lambda: seen.append((real(fixed).tolist(), real(moving).tolist())), moment)
            uploads.append(counts.uploads)
        assert seen == [([5, 6], [3, 6]), ([5, 6], [7, 14])]
        assert uploads == [2, 1]  # what never changes goes up once


def test_noting_ends_and_may_stand_within_another():
    with pretended():
        with capture_uploads() as outer:
            with capture_uploads() as inner:
                upload(torch.ones(1), DEVICE)
            upload(torch.ones(1), DEVICE)
        upload(torch.ones(1), DEVICE)
        assert len(inner) == len(outer) == 1


def test_rates_are_numbers_on_a_cpu_and_cells_of_a_device():
    now, later = context(0, 0.5, 0.25, 0.5), context(1, 0.1, 0.2, 0.1)
    assert rates_of(now, range(3), torch.zeros(1)) == [(0.5, [0, 2]), (0.25, [1])]
    with pretended():
        like = torch.zeros(1, device=DEVICE)
        with capture_uploads() as cells:
            (first, ids), (second, others) = rates_of(now, range(3), like)
        assert (ids, others) == ([0, 2], [1])
        filled(cells, lambda: None, later)
        torch.testing.assert_close(torch.stack([first.cpu(), second.cpu()]), torch.tensor([0.1, 0.2]))
    assert pattern(now) == pattern(later) == (0, 1, 0)
    assert pattern(context(2, 0.1, 0.1, 0.0)) == (0, 0, -1)


def test_a_bucket_in_another_step_has_its_draws_and_rates():
    bucket = Bucket.of([torch.zeros(1, 2, 3)] * 3, context(4, 1.0, 2.0, 3.0), [2, 0], [0])
    later = bucket.at(context(5, 10.0, 20.0, 30.0))
    assert (later.step, later.lrs) == (5, [30.0, 10.0])
    assert later.keys("x") != bucket.keys("x") and later.at(context(4, 1.0, 2.0, 3.0)).keys("x") == bucket.keys("x")


def test_tables_are_told_as_long_as_somebody_keeps_them():
    before = len(tables())
    kept = table(torch.arange(3), torch.device("meta"))
    assert any(kept is one for one in tables()) and len(tables()) == before + 1
    del kept
    assert len(tables()) == before

"""GradiVeQ: against an obvious twin in float64, its identities, bytes step by step, and values that are refused."""

import pytest
import torch

from accordion_bench import conformance
from accordion_bench.compressors.gradiveq import GradiVeQ
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.conformance import placement
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.conformance.test_conformance import owed
from tests.kit.helpers import SPECS, exchange_for, gradients, residuals
from tests.kit.processes import forked

SHORT = {"basis_steps": 2, "period": 5}


def cut(x: torch.Tensor, length: int) -> torch.Tensor:
    """A tensor's vectors, one below the other."""
    flat = x.flatten()
    rows = -(-len(flat) // length)
    whole = torch.zeros(rows * length, dtype=x.dtype)
    whole[: len(flat)] = flat
    return whole.view(rows, length)


def twin(steps: int, workers: int, rank: int, length: int) -> tuple[list, dict]:
    """All steps as one writes them down: the basis by a singular value decomposition of all mean gradients."""
    kept = {(spec.name, w): torch.zeros(spec.shape, dtype=torch.float64) for spec in SPECS for w in range(workers)}
    seen: dict = {}
    bases: dict = {}
    found = []
    for step in range(steps):
        xs_W = gradients(workers=workers, step=step).tensors
        updates = []
        for spec, x_W in zip(SPECS, xs_W, strict=True):
            if spec.ndim < 2 or spec.numel < length or rank * -(-spec.numel // length) > spec.numel:
                updates.append(x_W.mean(0))
                continue
            ps = [x_W[w] + kept[spec.name, w] for w in range(workers)]
            mean, turn = sum(ps) / workers, step % SHORT["period"]
            if turn < SHORT["basis_steps"]:
                seen.setdefault(spec.name, []).append(cut(mean, length))
                if turn == SHORT["basis_steps"] - 1:
                    _, _, Vh = torch.linalg.svd(torch.cat(seen.pop(spec.name)), full_matrices=True)
                    bases[spec.name] = Vh[:rank].T
                for w in range(workers):
                    kept[spec.name, w] = torch.zeros(spec.shape, dtype=torch.float64)
                updates.append(mean)
                continue
            U = bases[spec.name]

            def back(p, U=U, spec=spec):
                return (cut(p, length) @ U @ U.T).flatten()[: spec.numel].view(spec.shape)

            updates.append(back(mean))
            for w in range(workers):
                kept[spec.name, w] = ps[w] - back(ps[w])
        found.append(updates)
    return found, kept


@pytest.mark.parametrize(("rank", "length"), [(2, 16), (3, 32), (1, 8)])
def test_as_an_obvious_twin(rank, length):
    exchange, plan = exchange_for("gradiveq", 3, rank=rank, length=length, **SHORT)
    wanted, kept = twin(9, 3, rank, length)
    for step in range(9):
        updates = exchange(gradients(workers=3, step=step).tensors, StepInfo(plan, step))
        for update, expected in zip(updates, wanted[step], strict=True):
            torch.testing.assert_close(update, expected, rtol=1e-10, atol=1e-10)
    for name, residual_W in residuals(exchange).items():
        for w in range(3):
            torch.testing.assert_close(residual_W[w], kept[name, w], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [4, 16, 64])
def test_all_coefficients_are_dense(length):
    """U U^T = 1: where K divides a tensor it is sent as coefficients, and comes back as the mean."""
    specs = [TensorSpec("w", (8, 64)), TensorSpec("v", (4, 4, 8))]
    exchange, plan = exchange_for("gradiveq", 3, specs, rank=length, length=length, **SHORT)
    for step in range(7):
        xs_W = gradients(specs, 3, step=step).tensors
        for update, x_W in zip(exchange(xs_W, StepInfo(plan, step)), xs_W, strict=True):
            torch.testing.assert_close(update, x_W.mean(0), rtol=1e-10, atol=1e-10)
    assert max(float(e_W.abs().max()) for e_W in residuals(exchange).values()) < 1e-10


def test_every_step_sends_what_is_predicted():
    exchange, plan = exchange_for("gradiveq", 4, dtype=torch.float32, rank=4, length=32, **SHORT)
    seen = []
    for step in range(10):
        before, promised = exchange.comm.ledger.counts["payload"], exchange.predicted_bytes(StepInfo(plan, step))
        exchange(gradients(dtype=torch.float32, step=step).tensors, StepInfo(plan, step))
        seen.append((exchange.comm.ledger.counts["payload"] - before) / 4)
        assert seen[-1] == promised
    dense = 4 * sum(spec.numel for spec in SPECS)
    assert seen[:2] == seen[5:7] == [dense, dense] and len(set(seen[2:5] + seen[7:])) == 1
    assert sum(seen) / 10 == pytest.approx(exchange.mean_bytes(StepInfo(plan, 0)), abs=0.5)


@pytest.mark.parametrize(("rank", "length"), [(8, 64), (1, 100), (64, 64)])
def test_payload_is_r_over_k_and_the_steps_of_the_basis(rank, length):
    spec = TensorSpec("w", (64, 8, 3, 3))
    vectors = -(-spec.numel // length)
    own = GradiVeQ(rank, length, 3, 30)
    assert payload_bytes(own, spec, rank, 4) == pytest.approx((3 * 4 * spec.numel + 27 * 4 * rank * vectors) / 30)


CHECKS = [c for c in conformance.CHECKS if conformance.name_of(c) != "placement"]


@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
def test_the_kit_passes_where_bases_are_made_often(check):
    owed(conformance.run(check, conformance.from_yaml("gradiveq", basis_steps=1, period=3), levels=[None]))


def test_placements_do_not_matter_in_steps_with_a_basis(tmp_path):
    """Four workers in one process, two processes of two, four of one."""
    makes = [conformance.from_yaml("gradiveq", basis_steps=1, period=3, error_feedback=e) for e in (True, "loco")]
    with forked():
        found = placement.results([(make, None) for make in makes], tmp_path)
    for number in range(len(makes)):
        placement.compare(found, number)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "rank must be an integer of at least 1, got 0"),
        ({"length": 0}, "length must be an integer of at least 1, got 0"),
        ({"rank": 65}, "rank must be at most length, 64, got 65"),
        ({"basis_steps": 0}, "basis_steps must be"),
        ({"period": 4}, "period must be above basis_steps, 4, or every step would be dense, got 4"),
        ({"period": 2}, "period must be above basis_steps"),
    ],
)
def test_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        GradiVeQ(**options)

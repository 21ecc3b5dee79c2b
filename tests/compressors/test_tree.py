"""gTopK: against an obvious twin in float64, identities, replicas, bytes of every round, and what is refused."""

import math

import pytest
import torch

from accordion_bench import conformance
from accordion_bench.compressors.probe import payload_bytes, wire_bytes
from accordion_bench.compressors.tree import rounds
from accordion_bench.conformance import placement
from accordion_bench.conformance.subject import Setup
from accordion_bench.plan import TensorSpec
from tests.config.test_bad_input import never_launched, sentence  # noqa: F401  (what is not refused fails there)
from tests.conformance.test_conformance import owed
from tests.kit.helpers import SPECS, gradients, residuals
from tests.kit.processes import forked

X = [TensorSpec("x", (5, 40))]


def setup_of(workers: int, specs=SPECS, **options) -> Setup:
    return Setup(conformance.from_yaml("topk", collective="tree", **options)(), workers=workers, specs=specs)


def top(values: dict[int, float], k: int) -> dict[int, float]:
    """The k entries of largest magnitude, ties to the lower index, as a message has them: in float32."""
    order = sorted(range(200), key=lambda i: (-abs(values.get(i, 0.0)), i))
    return {i: float(torch.tensor(values.get(i, 0.0), dtype=torch.float64).float()) for i in order[:k]}


def merged(ours: dict[int, float], theirs: dict[int, float], k: int) -> tuple[dict[int, float], dict[int, float]]:
    """The largest entries of a sum, and what it has lost."""
    total = {i: ours.get(i, 0.0) + theirs.get(i, 0.0) for i in ours.keys() | theirs.keys()}
    kept = top(total, k)
    return kept, {i: value - kept.get(i, 0.0) for i, value in total.items()}


def twin_step(ps: list[torch.Tensor], k: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One step as the paper has it: a tree in which one of a pair sends, and the result is broadcast.

    Returns:
        the update [N], and what each worker keeps.
    """
    workers, first = len(ps), [top(dict(enumerate(p.tolist())), k) for p in ps]
    at, lost = [dict(message) for message in first], [dict[int, float]() for _ in ps]

    def send(source: int, target: int) -> None:
        at[target], dropped = merged(at[target], at[source], k)
        for i, value in dropped.items():
            lost[target][i] = lost[target].get(i, 0.0) + value

    core = 1 << int(math.log2(workers))
    for source in range(core, workers):
        send(source, source - core)
    stride = 1
    while stride < core:
        for target in range(0, core, 2 * stride):
            send(target + stride, target)
        stride *= 2
    result, update, kept = at[0], torch.zeros(200, dtype=torch.float64), []
    for i, value in result.items():
        update[i] = value / workers
    for p, own, of_sums in zip(ps, first, lost, strict=True):
        e = p.clone()
        for i, value in own.items():
            if result.get(i):
                e[i] -= value
        for i, value in of_sums.items():
            if result.get(i):
                e[i] += value
        kept.append(e)
    return update, kept


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 7, 8])
def test_as_an_obvious_twin(workers):
    setup, kept = setup_of(workers, X, density=0.06), [torch.zeros(200, dtype=torch.float64)] * workers
    for step in range(4):
        (x_W,) = gradients(X, workers=workers, step=step).tensors
        (update,) = setup([x_W.clone()], step)
        wanted, kept = twin_step([x_W[w].flatten() + kept[w] for w in range(workers)], 12)
        torch.testing.assert_close(update.flatten(), wanted, rtol=1e-10, atol=1e-10)
        found = residuals(setup.exchange)["x"].flatten(1)
        torch.testing.assert_close(found, torch.stack(kept), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_all_entries_are_the_dense_mean(workers):
    setup = setup_of(workers, X, density=1.0)
    (x_W,) = gradients(X, workers=workers).tensors
    x_W = x_W.float().double()
    (update,) = setup([x_W.clone()])
    torch.testing.assert_close(update, x_W.mean(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_what_is_applied_and_what_is_kept_is_the_sum_of_the_gradients(workers, reduce):
    setup, factor = setup_of(workers, density=0.05, reduce=reduce), 1 if reduce == "mean" else workers
    total = [torch.zeros(spec.shape, dtype=torch.float64) for spec in SPECS]
    target, levels = [x.clone() for x in total], setup.context().levels
    pays = [setup.compressor.pays(spec, 0.05, workers) for spec in SPECS]
    merged_ones = [i for i, level in enumerate(levels) if level is not None and pays[i]]
    assert len(merged_ones) > 4
    for step in range(5):
        xs_W = gradients(workers=workers, step=step).tensors
        for i, update in enumerate(setup([x_W.clone() for x_W in xs_W], step)):
            total[i] += update / (factor if i in merged_ones else 1)
            target[i] += xs_W[i].mean(0)
    kept = residuals(setup.exchange)
    for i, spec in enumerate(SPECS):
        own = total[i] + (kept[spec.name].mean(0) if spec.name in kept else 0)
        torch.testing.assert_close(own, target[i], rtol=1e-10, atol=1e-10)


def test_at_most_k_entries_are_applied_and_ties_go_to_the_lower_index():
    """Equal entries everywhere: the first k, whatever the workers."""
    for workers in (3, 4):
        setup = setup_of(workers, X, density=0.1, error_feedback=False)
        (update,) = setup([torch.ones(workers, 5, 40, dtype=torch.float64)])
        assert update.flatten()[:20].eq(1).all() and not update.flatten()[20:].any()


def test_who_sends_to_whom():
    assert rounds(1) == []
    assert rounds(2) == [[1, 0]]
    assert rounds(4) == [[1, 0, 3, 2], [2, 3, 0, 1]]
    assert rounds(3) == [[None, None, 0], [1, 0, None], [2, None, None]]
    for workers in range(1, 70):
        turns = rounds(workers)
        log = int(math.log2(workers))
        assert len(turns) == log + (2 if workers > 1 << log else 0)
        for targets_A in turns:
            sent = [target for target in targets_A if target is not None]
            assert len(targets_A) == workers and len(set(sent)) == len(sent)


SPEC = TensorSpec("x", (250, 400))


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_the_ledger_prices_every_round_as_it_is_sent(workers):
    setup = Setup(conformance.from_yaml("topk", collective="tree", density=0.01)(), workers=workers, specs=[SPEC],
                  dtype=torch.float32)  # fmt: skip
    compressor, message = setup.compressor, setup.compressor.inner.inner.message_bytes(SPEC, 0.01)
    setup(gradients([SPEC], workers=workers, dtype=torch.float32).tensors)
    log = int(math.log2(workers))
    others = workers - (1 << log)
    sent = message * (log * (workers - others) + 2 * others)
    counts = setup.comm.ledger.counts
    assert (
        counts["payload"] == counts["wire"] == sent == round(workers * payload_bytes(compressor, SPEC, 0.01, workers))
    )
    assert sent == round(workers * wire_bytes(compressor, SPEC, 0.01, workers))
    assert counts["rounds"] == len(rounds(workers)) == log + 2 * (others > 0)
    gathered = conformance.from_yaml("topk", density=0.01)().compressor
    assert wire_bytes(gathered, SPEC, 0.01, workers) == (workers - 1) * message


def test_it_pays_at_more_workers_than_a_gather():
    tree, gathered = (conformance.from_yaml("topk", collective=c)().compressor for c in ("tree", "all_gather"))
    pays = [[w for w in range(2, 65) if c.pays(SPEC, 0.1, w)] for c in (tree, gathered)]
    assert max(pays[0]) == 64 and max(pays[1]) < 20


CHECKS = [c for c in conformance.CHECKS if conformance.name_of(c) not in ("placement", "contraction")]


@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
def test_the_kit_passes(check):
    owed(conformance.run(check, conformance.from_yaml("topk", collective="tree"), levels=[None]))


def test_placements_do_not_matter(tmp_path):
    """Four workers in one process, two processes of two, four of one."""
    forms = [{}, {"error_feedback": False}, {"residual": "aggregate"}, {"error_feedback": "loco"}]
    makes = [conformance.from_yaml("topk", collective="tree", **form) for form in forms]
    with forked():
        found = placement.results([(make, None) for make in makes], tmp_path)
    for number in range(len(makes)):
        placement.compare(found, number)


REFUSED = {
    "compressor=qsgd compressor.collective=tree": "compressor.collective must be all_gather or two_way, because",
    "compressor=topk compressor.chunk=64 compressor.collective=tree": "compressor.collective must be all_gather, "
    "because a worker of two_way",
    "compressor=topk compressor.error_feedback=ef21 optimizer.momentum=0 compressor.collective=tree": "compressor."
    "collective must be all_gather with error_feedback=ef21, because pairs of workers",
    "compressor=topk compressor.collective=treee": "compressor.collective must be all_gather or two_way or tree, got",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_refused_in_a_sentence(typed):
    assert sentence(*typed.split()).startswith(REFUSED[typed])

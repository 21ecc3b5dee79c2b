"""Sparse methods on the device: the CPU's numbers, launches that do not grow with tensors, few waits."""

import numpy as np
import pytest
import torch

from accordion_bench.codecs import packed_codes
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.threshold import clipped
from accordion_bench.conformance.pretend_device import DEVICE, Pretend, pretended
from accordion_bench.conformance.subject import Setup, from_yaml, plain
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.upload import upload
from scripts.echo import echoed

METHODS = {
    "topk": {},
    "topk at 1": {"density": 1.0},
    "topk that keeps nothing of small ones": {"density": 0.002, "count": "floor", "reduce": "sum"},
    "topk two-way": {"collective": "two_way"},
    "topk of the model": {"scope": "model", "density": 0.01},
    "randomk": {},
    "randomk unbiased": {"error_feedback": False, "density": 0.3},
    "threshold": {"density": 0.3},
    "threshold absolute": {"threshold": 0.9, "density": 0.2},
    "dgc": {"warmup_epochs": 0, "density": 0.05, "clip": 0.5},
    "adacomp": {},
    "demo": {"k": 4},
    "demo in bfloat16": {"k": 2, "value_dtype": "bfloat16", "chunk": 8},
}
# odd sides, equal shapes apart from each other, one entry, one that is long enough for a sample
SPECS = [
    TensorSpec(name, shape)
    for name, shape in {
        "a": (16, 9, 3, 3),
        "bias": (16,),
        "long": (90, 101),
        "b": (16, 9, 3, 3),
        "odd": (7, 11),
        "one": (1, 1),
        "c": (16, 9, 3, 3),
        "odder": (11, 7),
        "other bias": (17,),
    }.items()
]
WAITS = {"threshold": 1, "dgc": 1, "adacomp": 1}  # for how many entries there are; all others know


def maker(case: str):
    return from_yaml(case.split()[0], **METHODS[case])


def numbers(kind: str, step: int, specs=SPECS, workers: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    xs_W = [torch.randn(workers, *spec.shape, generator=generator) for spec in specs]
    if kind == "ties":
        xs_W = [(2 * x_W).round() / 2 for x_W in xs_W]
    if kind == "zeros":
        xs_W = [x_W * (i % 2) for i, x_W in enumerate(xs_W)]
        xs_W[-1][1] = 0
    return xs_W


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("case", "kind"),
    # which of equal coefficients torch.topk takes for DeMo is not said
    [
        (c, kind)
        for c in METHODS
        for kind in ("normal", "ties", "zeros")
        if not (c.startswith("demo") and kind == "ties")
    ],
)
def test_updates_and_state_are_those_of_the_cpu(case, kind):
    here = Setup(maker(case)(), workers=3, specs=SPECS, dtype=torch.float32)
    with pretended():
        there = Setup(maker(case)(), workers=3, specs=SPECS, dtype=torch.float32, device=str(DEVICE))
        for step in range(3):
            xs_W = numbers(kind, step)
            theirs = [u.cpu() for u in there([upload(x, DEVICE) for x in xs_W], step)]
            for ours, other in zip(here(xs_W, step), theirs, strict=True):
                torch.testing.assert_close(other, ours, rtol=2e-6, atol=1e-6)
        assert there.comm.ledger.counts == here.comm.ledger.counts
        for name, entries in here.snapshot().items():
            for key, ours in entries.items():
                torch.testing.assert_close(there.exchange.state[name][key].cpu(), ours, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["topk", "threshold", "adacomp"])
def test_several_senders_are_summed_in_their_order(case):
    """Sparse values of many workers at one place: the last bit depends on the order, and all ranks must agree on it."""
    specs = [TensorSpec("a", (40, 30)), TensorSpec("b", (60, 30))]
    make = maker(case)
    xs_W = numbers("normal", 5, specs, workers=7)
    for x_W in xs_W:
        x_W *= 10 ** torch.arange(7.0).view(7, 1, 1)
    ours = Setup(plain(make), 0.1, workers=7, specs=specs, dtype=torch.float32)(xs_W)
    with pretended():
        there = Setup(plain(make), 0.1, workers=7, specs=specs, dtype=torch.float32, device=str(DEVICE))
        for other, own in zip(there([upload(x, DEVICE) for x in xs_W]), ours, strict=True):
            assert torch.equal(other.cpu(), own)


def spent(case: str, specs: list[TensorSpec], processes: int) -> tuple[int, int]:
    """(launches, waits) of one exchange of one bucket, of one of some processes, in its third step."""
    with pretended() as counts, echoed(processes):
        comm = Comm(1, processes, 0, str(DEVICE))
        setup = Setup(plain(maker(case)), specs=specs, dtype=torch.float32, device=str(DEVICE), comm=comm)
        for step in range(3):
            xs_W = [upload(x_W, DEVICE) for x_W in numbers("normal", step, specs, 1)]
            sent_W, ctx = setup.exchange.as_sent(xs_W), setup.context(step)
            counts.reset()
            setup.compressor.exchange(sent_W, ctx, setup.exchange.state, comm)
        return sum(counts.launches.values()), sum(counts.waits.values())


@pytest.mark.parametrize("case", METHODS)
def test_the_host_waits_at_most_once(case):
    processes = 1 if case == "topk two-way" else 8  # an echo is no owner of other pieces
    assert spent(case, SPECS, processes)[1] <= WAITS.get(case.split()[0], 0)


MOST = {"demo": 300, "dgc": 180}  # of three shapes; messages are cut tensor by tensor, DeMo's chunk by chunk


@pytest.mark.parametrize("case", [case for case in METHODS if case not in ("topk two-way", "topk at 1")])
def test_launches_do_not_grow_with_the_number_of_tensors(case):
    """Two tensors of each shape, or eight."""
    shapes = [(24, 20), (16, 9, 3, 3), (90, 101)]
    few, many = ([TensorSpec(f"{shape}{i}", shape) for i in range(times) for shape in shapes] for times in (2, 8))
    launches = spent(case, few, 2)[0]
    assert spent(case, many, 2)[0] == launches <= MOST.get(case.split()[0], 160)


@pytest.mark.sample(4)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("case", [case for case in METHODS if "randomk" not in case])  # it sees what it draws
def test_what_is_not_finite_shows_in_the_update(case, value):
    """Nobody looks at numbers inside an exchange: the flag of the updates must find it."""
    with pretended():
        setup = Setup(plain(maker(case)), workers=3, specs=SPECS, dtype=torch.float32, device=str(DEVICE))
        xs_W = numbers("normal", 0)
        xs_W[0][1, 3, 4, 1, 1] = value
        updates, _ = setup.contributions([upload(x_W, DEVICE) for x_W in xs_W])
        assert not all(bool(u.cpu().isfinite().all()) for u in updates)


# ---- the parts


def test_sizes_of_codes_are_those_of_one_code_at_a_time():
    generator = np.random.default_rng(0)
    n = np.exp2(generator.uniform(0, generator.choice([3, 10, 27], 3000))).astype(np.int64)
    k = np.minimum(n, np.exp2(generator.uniform(0, 1, 3000) * np.log2(n + 1)).astype(np.int64))
    k[::7], k[1::7] = 0, n[1::7]
    by_rank, _, low_bytes, high_bytes = packed_codes.code_shapes(n, k)
    for i in range(len(n)):
        kind, nbytes = packed_codes.index_bytes(int(n[i]), int(k[i]))
        assert low_bytes[i] + high_bytes[i] == nbytes
        assert not k[i] or (kind == "elias-fano") == bool(by_rank[i])


def test_clipping_on_the_device_waits_for_nothing():
    xs_W = numbers("normal", 3)
    with pretended() as counts:
        theirs = [upload(x_W, DEVICE) for x_W in xs_W]
        counts.reset()
        clipped_W = clipped(theirs, 0.5, 4)
        assert not counts.waits
        for ours, other in zip(clipped(xs_W, 0.5, 4), clipped_W, strict=True):
            assert isinstance(other, Pretend)
            torch.testing.assert_close(other.cpu(), ours)

"""Sparse methods on the device: the CPU's numbers, launches that do not grow with tensors, few waits."""

import numpy as np
import pytest
import torch

from accordion_bench.codecs import index_codes
from accordion_bench.codecs.device_selection import Part, about, above, chosen, listed
from accordion_bench.codecs.section_codes import SectionCodes, SectionLayout
from accordion_bench.codecs.selection import at_least, sampled_top
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.dgc import clipped
from accordion_bench.conformance.pretend_device import DEVICE, Pretend, pretended
from accordion_bench.conformance.stand_ins import echoed
from accordion_bench.conformance.subject import Setup, from_yaml, plain
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.upload import upload

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
    by_rank, _, low_bytes, high_bytes = index_codes.code_shapes(n, k)
    for i in range(len(n)):
        kind, nbytes = index_codes.index_bytes(int(n[i]), int(k[i]))
        assert low_bytes[i] + high_bytes[i] == nbytes
        assert not k[i] or (kind == "elias-fano") == bool(by_rank[i])


@pytest.mark.parametrize("seed", range(20))
def test_codes_of_many_sections_come_back(seed):
    generator = np.random.default_rng(seed)
    sections, messages, rows = generator.integers(1, 6), generator.integers(1, 4), int(generator.integers(1, 4))
    sizes = np.exp2(generator.uniform(0, 12, sections)).astype(int).tolist()
    starts = [sum(sizes[:s]) for s in range(sections)]
    counts = [int(generator.choice([0, n, generator.integers(0, n + 1)])) for _ in range(messages) for n in sizes]
    counts[0] = sizes[0]
    places = [
        np.concatenate(
            [
                starts[q % sections] + np.sort(generator.permutation(sizes[q % sections])[:k])
                for q, k in enumerate(counts)
            ]
        )
        for _ in range(rows)
    ]
    positions_R = torch.from_numpy(np.stack(places).astype(np.int64))
    layout = SectionLayout(starts * messages, sizes * messages, counts, sections)
    codes = SectionCodes(layout, torch.device("cpu"))
    code_R = codes.encode(positions_R)
    assert code_R.shape[1] == sum(index_codes.index_bytes(sizes[q % sections], k)[1] for q, k in enumerate(counts))
    assert torch.equal(codes.decode(code_R), positions_R)


@pytest.mark.parametrize(("n", "k"), [(1000, 30), (1000, 400), (1000, 1000), (5, 1), (1 << 20, 1), (70_001, 9000)])
def test_the_code_of_one_section_is_that_of_the_cpu(n, k):
    positions = torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort().values[None]
    codes = SectionCodes(SectionLayout([0], [n], [k], 1), torch.device("cpu"))
    assert torch.equal(codes.encode(positions), index_codes.encode_indices(positions, n))


@pytest.mark.parametrize("seed", range(12))
def test_a_sampled_threshold_sends_what_the_cpu_sends(seed):
    """Also where the sample misleads: too low or too high, all zero, denormal."""
    generator = np.random.default_rng(seed)
    torch_generator = torch.Generator().manual_seed(seed)
    parts, wanted, checks, start, rows = [], [], [], 0, 2
    for _ in range(3):
        n, sections = int(generator.choice([1, 60, 3000, 20_011, 50_021])), int(generator.integers(1, 3))
        k, share = max(1, int(generator.choice([0.0005, 0.01, 0.1, 0.6]) * n)), float(generator.choice([0.01, 0.6]))
        arguments = (k, share, float(generator.choice([0.8, 0, 1])), float(generator.choice([1.3, 1])), seed)
        some = about(n, *arguments)
        parts.append(Part(start, sections, n, listed(n, some)))
        wanted += [some] * sections
        checks += [(start + s * n, n, arguments) for s in range(sections)]
        start += sections * n
    x_R = torch.randn(rows, start, generator=torch_generator) ** int(generator.choice([1, 5]))
    for (first, _, _), some in zip(checks, wanted, strict=True):
        if some.sample and generator.random() < 0.6:
            sample = slice(first + some.sample.start, first + some.sample.stop, some.sample.step)
            x_R[0, sample] *= float(generator.choice([1e-3, 1e3, 0, 1e-40]))
    counts_R, positions_R = chosen(x_R, parts, wanted)
    for x, counts, positions in zip(x_R, counts_R.tolist(), positions_R, strict=True):
        expected = [first + sampled_top(x[first : first + n], *arguments) for first, n, arguments in checks]
        assert counts == [len(found) for found in expected]
        assert torch.equal(positions[: sum(counts)], torch.cat(expected))


@pytest.mark.parametrize("threshold", [0.1, 0.75, 1e-50, 100.0])
def test_a_known_threshold_sends_what_the_cpu_sends(threshold):
    x = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 4).round() / 4
    some = above(threshold, most=300)
    counts, positions = chosen(x[None], [Part(0, 1, 500, listed(500, some))], [some])
    found = at_least(x, threshold)
    if len(found) <= 300:
        assert torch.equal(positions[0, : int(counts)], found)
    else:
        assert int(counts) == 300


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

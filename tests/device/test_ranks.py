"""PowerSGD, ATOMO, casts and the dense mean on a device: what they launch, and that they give what the CPU gives."""

import functools

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.pretend_device import DEVICE, pretended
from accordion_bench.conformance.subject import Setup, bare, from_yaml, max_relative_difference
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors.same_shape import Blocks
from scripts.echo import echoed
from scripts.launches import gpt2, resnet50, small
from tests.kit.helpers import SPECS, gradients

NETWORKS = {"resnet50": resnet50, "gpt2": gpt2}


@functools.cache
def counted(name: str, network: str, together: bool) -> tuple[int, dict[str, int]]:
    """(launches, waits) of a method alone, its exchange and the residuals, in the third step of 1 of 8 processes.

    Args:
        name: of the compressor's file.
        network: its tensors stand in one bucket.
        together: tensors of equal shape lie side by side, as residuals do; else as autograd leaves them.
    """
    specs = small(NETWORKS[network]())
    with pretended() as counts, echoed(8):
        setup = Setup(from_yaml(name)(), specs=specs, dtype=torch.float32, comm=Comm(1, 8, 0, str(DEVICE)))
        method, state = bare(setup.compressor), {}
        for step in range(3):
            blocks = Blocks(specs, 1, torch.zeros((), device=DEVICE)).tensors
            for spec, x_W in zip(specs, blocks, strict=True):
                x_W.copy_(torch.randn(1, *spec.shape, generator=torch.Generator().manual_seed(step)))
            xs_W = blocks if together else [x_W.clone() for x_W in blocks]
            counts.reset()
            method.exchange(xs_W, setup.context(step), state, setup.comm).subtract_sent_(dict(enumerate(xs_W)))
        return sum(counts.launches.values()), dict(counts.waits)


@pytest.mark.sample(5)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", ["none", "bf16", "fp16"])
def test_a_dozen_launches_however_many_tensors(name, network, together):
    launches, waits = counted(name, network, together)
    assert launches <= 12 and not waits


@pytest.mark.sample(3)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
def test_powersgd_starts_a_few_however_many_shapes(network, together):
    """Beside copies that put tensors side by side for torch, which stands in for kernels that need none."""
    launches, waits = counted("powersgd", network, together)
    copies = 0 if together else len({spec.shape for spec in NETWORKS[network]()})
    assert launches <= 20 + copies and not waits


@pytest.mark.sample(2)
@pytest.mark.parametrize(("network", "most"), [("resnet50", 1200), ("gpt2", 360)])
def test_atomo_launches_by_shape(network, most):
    """Beside what torch's eigenvectors launch, and wait for, by themselves: once for a shape."""
    launches, waits = counted("atomo", network, False)
    assert launches <= most and not waits


WIDE = [*SPECS, TensorSpec("d", (32, 16)), TensorSpec("e", (16, 32)), TensorSpec("empty", (0, 4))]


def both(name: str, workers: int, given, specs=WIDE, processes: int = 1, levels=None, **options) -> float:
    """Largest difference of the updates and residuals of CPU and device over some steps, relative.

    Args:
        name: of the compressor's file.
        workers: in this process.
        given: called with each step, gives the gradients.
        specs: of the tensors.
        processes: that there seem to be.
        levels: of the knob, step by step; default: as configured.
        options: of the compressor.
    """
    found, logs = [], []
    for device in (torch.device("cpu"), DEVICE):
        with pretended(), echoed(processes) as echo:
            comm = Comm(workers, processes, 0, str(device))
            setup = Setup(
                from_yaml(name, **options)(), None, specs=specs, dtype=torch.float32, device=str(device), comm=comm
            )
            out = []
            for step in range(3):
                if levels:
                    setup.exchange.ladder = Ladder(setup.compressor.traits.knob, tuple(dict.fromkeys(levels)))
                    index = setup.exchange.ladder.values.index(levels[step])
                    setup.plan = Plan({key: index for key in setup.plan.levels}, 1)
                updates = setup.exchange([x.to(device) for x in given(step)], StepInfo(setup.plan, step, 1.0, 1000.0))
                out += [x.cpu().clone() for x in updates]
            out += [state["residual_W"].cpu() for state in setup.exchange.state.values() if "residual_W" in state]
            found.append(out)
            logs.append((echo.log, comm.ledger.counts))
    assert logs[0] == logs[1], "other collectives, or other bytes"
    return max_relative_difference(found[1], found[0])


def drawn(workers: int, specs=WIDE):
    """Gradients by step."""
    return lambda step: (
        gradients([s for s in specs if s.numel], workers, dtype=torch.float32, step=step).tensors
        + [torch.zeros(workers, *s.shape) for s in specs if not s.numel]
    )


@pytest.mark.sample(5)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"rank": 1},
        {"rank": 2},
        {"rank": 4, "min_compression_rate": 0},
        {"rank": 2, "error_feedback": False},
        {"rank": 2, "residual": "aggregate"},
        {"rank": 3, "warm_start": False},
        {"rank": 2, "orthonormalisation": "gramschmidt"},
    ],
)
def test_powersgd_is_that_of_the_cpu(options, workers):
    assert both("powersgd", workers, drawn(workers), processes=3, **options) < 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("on_switch", ["keep", "redraw"])
def test_powersgd_switches_ranks_as_on_the_cpu(on_switch):
    assert both("powersgd", 2, drawn(2), levels=[2, 4, 1], on_switch=on_switch) < 1e-4


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", ["zero", "low rank", "tiny", "huge", "one row"])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_takes_what_has_no_rank(rank, kind):
    """Zero and back, ranks below that of the factors, scales whose squares float32 does not have."""

    specs = [s for s in WIDE if s.ndim > 1 and s.numel]

    def given(step: int) -> list[torch.Tensor]:
        xs_W = drawn(2, specs)(step)
        if kind == "zero":
            return [x_W * (step != 1) for x_W in xs_W]
        if kind == "low rank":
            return [x_W.flatten(2).sum(2).view(2, -1, *[1] * (x_W.ndim - 2)).expand_as(x_W).clone() for x_W in xs_W]
        if kind == "one row":
            return [torch.cat([x_W[:, :1], x_W[:, 1:] * 0], dim=1) for x_W in xs_W]
        return [x_W * {"tiny": 1e-30, "huge": 1e15}[kind] for x_W in xs_W]

    # an empty direction is filled somehow, and what one worker alone has in it goes with it; the mean has nothing there
    feedback = kind != "low rank"
    assert both("powersgd", 2, given, specs=specs, rank=rank, error_feedback=feedback) < 1e-4


@pytest.mark.sample(5)
@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["none", "bf16", "fp16"])
def test_sums_are_those_of_the_cpu(name, workers, error_feedback):
    options = {} if name == "none" else {"error_feedback": error_feedback}
    assert both(name, workers, drawn(workers), processes=4, **options) < 1e-6


def test_float16_is_cut_on_a_device_too():
    assert both("fp16", 2, lambda step: [x * 1e6 for x in drawn(2)(step)], processes=2, error_feedback=True) < 1e-3


@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("processes", [1, 2, 40])
def test_atomo_draws_what_the_cpu_draws(workers, processes):
    """At 40 processes its messages would cost more than a dense sum."""
    assert both("atomo", workers, drawn(workers), processes=processes, levels=[2, 1, 3]) < 1e-4


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["powersgd", "atomo", "fp16", "none"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_update(name, bad):
    """Nobody looks at it before it is sent; see `Exchange`."""
    with pretended():
        setup = Setup(from_yaml(name)(), workers=2, specs=SPECS, dtype=torch.float32, device=str(DEVICE))
        xs_W = [x.to(DEVICE) for x in drawn(2, SPECS)(0)]
        xs_W[3][1, 2, 0, 1, 1] = bad
        ctx, state = setup.context(), setup.exchange.state
        update = [x.cpu() for x in setup.compressor.exchange(xs_W, ctx, state, setup.comm).update]
    # what fp16 cannot hold is cut, which says nothing of infinity
    assert update[3].isfinite().all() == (name == "fp16" and bad == float("inf"))
    assert all(x.isfinite().all() for i, x in enumerate(update) if i != 3)

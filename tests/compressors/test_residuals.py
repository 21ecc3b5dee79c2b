"""Residuals in eight bits, and LoCo: twins in float64, identities, bounds of rounding, memory, and what is refused."""

import math

import pytest
import torch

from accordion_bench import conformance
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.conformance import placement
from accordion_bench.conformance.subject import LATE, Setup, kept_residuals, layers, same_state
from accordion_bench.exchange.dry_exchange import state_bytes
from accordion_bench.methods.labels import label
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.config.test_bad_input import never_launched, sentence  # noqa: F401  (what is not refused fails there)
from tests.conformance.test_conformance import EverySecond, owed
from tests.kit import composed
from tests.kit.helpers import SPECS, compressor, exchange_for, gradients, optimizer_for, yaml_names, yaml_node
from tests.kit.processes import forked

FED = [name for name in yaml_names("compressor") if "residual_bits" in yaml_node("compressor", name)]
BLOCK, STEPS = 256, 6


def setup_of(name: str, workers: int = 3, **options) -> Setup:
    return Setup(conformance.from_yaml(name)(worker_momentum=False, **options), workers=workers)


def step_of_one(setup: Setup, step: int) -> tuple[list[torch.Tensor], dict, dict, list[torch.Tensor]]:
    """Gradients of a lone worker, what it has kept before and after a step, and what it has sent: the updates."""
    before = {i: e_W[0].clone() for i, e_W in kept_residuals(setup)[0].items()}
    xs_W = gradients(workers=1, step=step).tensors
    sent = setup([x_W.clone() for x_W in xs_W], step)
    kept, eight = kept_residuals(setup)
    assert eight
    return [x_W[0] for x_W in xs_W], before, {i: e_W[0] for i, e_W in kept.items()}, sent


def rounded(e: torch.Tensor) -> torch.Tensor:
    """Q8 of one worker's residual, block by block: int8 times a float32 scale."""
    parts = []
    for block in e.flatten().split(BLOCK):
        scale = (block.abs().max().float().double() / 127).float()
        whole = (block.float() * (scale.reciprocal() if scale > 0 else 0)).round().clamp(-127, 127)
        parts.append(whole.double() * scale.double())
    return torch.cat(parts).view(e.shape)


def half_steps(e: torch.Tensor) -> torch.Tensor:
    """The bound of |Q8(e) - e| of each coordinate, with the rounding of float32."""
    blocks = [block.abs().max().expand(len(block)) for block in e.flatten().split(BLOCK)]
    return (torch.cat(blocks) / 254 * (1 + 1e-5)).view(e.shape)


def lossy(setup: Setup) -> list[int]:
    ctx = setup.context()
    pairs = enumerate(zip(ctx.specs, ctx.levels, strict=True))
    return [i for i, (spec, level) in pairs if setup.compressor.compresses(spec, level)]


# ---- eight bits


def test_every_method_with_error_feedback_offers_it():
    """Residuals that are a part of a method (adacomp, dgc, onebitadam) stay as they are."""
    takes = [name for name in yaml_names("compressor") if "error_feedback" in yaml_node("compressor", name)]
    assert takes == FED and len(FED) == 21


ONE_WAY = [name for name in FED if name != "distefblocksgd"]  # whose owners keep a residual, too: see the kit


@pytest.mark.parametrize("name", ONE_WAY)
def test_what_is_kept_is_what_was_not_sent_within_half_a_step(name):
    """p = g + e; sent + new e = p, but for the rounding of e, of which the bound is half a step of its block."""
    setup = setup_of(name, 1, error_feedback=True, residual_bits=8)
    assert lossy(setup)
    for step in range(STEPS):
        xs, before, after, sent = step_of_one(setup, step)
        for i in lossy(setup):
            wanted = before[i] + xs[i] - sent[i]
            assert ((after[i] - wanted).abs() <= half_steps(wanted) + 1e-9 * float(xs[i].abs().max())).all(), (i, step)


def test_the_first_residual_is_that_of_floats_rounded():
    for name in ("topk", "efsignsgd", "randomk"):
        setups = [setup_of(name, error_feedback=True, residual_bits=bits) for bits in (32, 8)]
        for setup in setups:
            setup(gradients(workers=3).tensors)
        floats, eight = (kept_residuals(setup)[0] for setup in setups)
        for i in lossy(setups[0]):
            for w in range(3):
                torch.testing.assert_close(eight[i][w], rounded(floats[i][w]), rtol=1e-6, atol=1e-9)


def test_memory_in_bytes():
    """A byte for each coordinate and four for each block, of every worker; the messages stay what they are."""
    specs = [TensorSpec("a", (64, 128)), TensorSpec("b", (10, 30)), TensorSpec("c", (7,))]
    numels = [spec.numel for spec in specs if spec.ndim >= 2]
    found, sent = {}, {}
    for bits in (32, 8):
        exchange, plan = exchange_for("topk", 2, specs, dtype=torch.float32, residual_bits=bits)
        exchange(gradients(specs, 2, dtype=torch.float32).tensors, StepInfo(plan, 0))
        found[bits], sent[bits] = state_bytes(exchange), exchange.comm.ledger.counts["payload"]
    assert found[32] == 2 * 4 * sum(numels)
    assert found[8] == 2 * sum(n + 4 * math.ceil(n / BLOCK) for n in numels)
    assert found[8] < 0.255 * found[32] and sent[8] == sent[32]


@pytest.mark.parametrize("name", ["topk", "powersgd", "qsgd", "distefblocksgd"])
@pytest.mark.parametrize("form", ["true", "loco"])
def test_what_is_probed_is_what_would_be_sent(name, form):
    setup = Setup(compressor(name, error_feedback=True if form == "true" else form, residual_bits=8), workers=1)
    for step in range(2):
        setup(gradients(workers=1, step=step).tensors, step)
    ctx, before = setup.context(2), setup.snapshot()
    inputs = setup.compressor.compressor_input(gradients(workers=1, step=2).tensors, ctx, setup.exchange.state, 1)
    assert same_state(setup.exchange.state, before) is None
    kept = kept_residuals(setup)[0]
    for i in kept:
        x_W = gradients(workers=1, step=2).tensors[i]
        if "momentum_W" not in before[SPECS[i].name]:
            torch.testing.assert_close(inputs[i], x_W + kept[i], rtol=1e-12, atol=1e-12)


# ---- LoCo


@pytest.mark.parametrize(("momentum", "reset"), [(0.8, 4), (0.5, 0), (0.0, 3)])
def test_loco_as_an_obvious_twin(momentum, reset):
    """h = g + e; the largest entries of h are sent; e <- b e + (1 - b) (h - sent); 0 after every T exchanges."""
    options = {"residual_bits": 32, "residual_momentum": momentum, "residual_reset": reset}
    specs = [TensorSpec("x", (6, 50))]
    exchange, plan = exchange_for("topk", 3, specs, density=0.1, error_feedback="loco", **options)
    kept = [torch.zeros(300, dtype=torch.float64) for _ in range(3)]
    for step in range(10):
        (x_W,) = gradients(specs, workers=3, step=step).tensors
        (update,) = exchange([x_W.clone()], StepInfo(plan, step))
        total = torch.zeros(300, dtype=torch.float64)
        for w in range(3):
            h = x_W[w].flatten() + kept[w]
            order = sorted(range(300), key=lambda j: (-abs(float(h[j])), j))
            sent = torch.zeros(300, dtype=torch.float64)
            for j in order[:30]:
                sent[j] = h[j].float()
            total += sent / 3
            kept[w] = momentum * kept[w] + (1 - momentum) * (h - sent)
            if reset and (step + 1) % reset == 0:
                kept[w] = torch.zeros_like(h)
        torch.testing.assert_close(update.flatten(), total, rtol=1e-10, atol=1e-10)
        own_W = exchange.state["x"]["residual_W"]
        torch.testing.assert_close(own_W.flatten(1), torch.stack(kept), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ONE_WAY)
def test_loco_keeps_a_moving_average_of_what_was_lost(name):
    """For every method: e' = Q8(b e + (1 - b) (h - sent)), h = g + e."""
    setup = setup_of(name, 1, error_feedback="loco")
    for step in range(3):
        xs, before, after, sent = step_of_one(setup, step)
        for i in lossy(setup):
            h = before[i] + xs[i]
            wanted = 0.8 * before[i] + 0.2 * (h - sent[i])
            assert ((after[i] - wanted).abs() <= half_steps(wanted) + 1e-9 * float(h.abs().max())).all(), (i, step)


@pytest.mark.parametrize("name", FED)
def test_without_momentum_and_resets_loco_is_error_feedback_bit_for_bit(name):
    for bits in (32, 8):
        of_loco = {"error_feedback": "loco", "residual_momentum": 0, "residual_reset": 0, "residual_bits": bits}
        ours = setup_of(name, **of_loco)
        theirs = setup_of(name, error_feedback=True, residual_bits=bits)
        for step in range(3):
            found = [s(gradients(workers=3, step=step).tensors, step, lr=0.5) for s in (ours, theirs)]
            assert all(map(torch.equal, *found)), (name, bits, step)


def test_after_a_reset_nothing_is_kept_in_whatever_bits():
    for bits in (32, 8):
        setup = setup_of("efsignsgd", error_feedback="loco", residual_reset=3, residual_bits=bits)
        for step in range(7):
            setup(gradients(workers=3, step=step).tensors, step)
            kept = kept_residuals(setup)[0].values()
            assert (max(float(e_W.abs().max()) for e_W in kept) == 0) == ((step + 1) % 3 == 0)


# ---- the conformance kit, placements, checkpoints, other numbers of workers

CHECKS = [c for c in conformance.CHECKS if conformance.name_of(c) not in ("placement", "contraction")]
FORMS = {"eight bits": {"error_feedback": True, "residual_bits": 8}, "loco": {"error_feedback": "loco"}}


@pytest.mark.sample(12)
@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FED)
def test_the_kit_passes(name, form, check):
    owed(conformance.run(check, conformance.from_yaml(name, **FORMS[form]), levels=[None]))


@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
@pytest.mark.parametrize("form", FORMS)
def test_and_around_somebody_elses(form, check):
    owed(conformance.run(check, conformance.from_class(EverySecond, **FORMS[form])))


@pytest.mark.parametrize(
    "names", [["topk", "qsgd", "powersgd", "distefblocksgd"], pytest.param(FED, marks=pytest.mark.slow)],
    ids=["some", "all"],
)  # fmt: skip
def test_placements_do_not_matter(names, tmp_path):
    """Four workers in one process, two processes of two, four of one."""
    makes = [conformance.from_yaml(name, **options) for name in names for options in FORMS.values()]
    with forked():
        found = placement.results([(make, None) for make in makes], tmp_path)
    for number in range(len(makes)):
        placement.compare(found, number)


def test_other_workers_get_the_mean_of_what_was_kept_rounded():
    setup = setup_of("topk", workers=4, error_feedback=True, residual_bits=8)
    for step in range(3):
        setup(gradients(workers=4, step=step).tensors, step)
    state = setup.exchange.state
    kept_A = [
        {
            name: {key: value[w] for key, value in entries.items() if key.endswith("_W")}
            for name, entries in state.items()
        }
        for w in range(4)
    ]
    share = setup.compressor.redistributed_state(kept_A, 0, 2)
    means = {i: e_W.mean(0) for i, e_W in kept_residuals(setup)[0].items()}
    for name, entries in share.items():
        for key, value in entries.items():
            assert value.dtype == state[name][key].dtype and value.shape == state[name][key].shape[1:]
            state[name][key][0] = value
    for i, e_W in kept_residuals(setup)[0].items():
        assert ((e_W[0] - means[i]).abs() <= half_steps(means[i]) + 1e-12).all()


# ---- words

REFUSED = {
    "residual_bits=4": "compressor.residual_bits must be null, 8 or 32, got 4; type compressor.residual_bits=8",
    "residual_bits=true": "compressor.residual_bits must be null, 8 or 32, got true",
    "residual_momentum=1": "compressor.residual_momentum must be a number at least 0 and below 1, got 1; type",
    "residual_reset=-1": "compressor.residual_reset must be an integer of at least 0, got -1; type",
    "error_feedback=lcoo": "compressor.error_feedback must be true, false, ef21 or loco, got lcoo",
}


@pytest.mark.parametrize("option", REFUSED)
def test_values_are_refused_before_the_run(option):
    typed = ["compressor=topk", "compressor.error_feedback=loco", f"compressor.{option}"]
    assert sentence(*typed[: 1 if option.startswith("error") else 2], typed[2]).startswith(REFUSED[option])


def test_estimates_are_not_rounded():
    with pytest.raises(
        ConfigError, match="residual_bits must be null or 32 with error_feedback=ef21, because other workers"
    ):
        node = yaml_node("compressor", "topk") | {"error_feedback": "ef21", "residual_bits": 8}
        wrapped_compressor(node, optimizer_for("compressor", "topk") | {"momentum": 0})


@pytest.mark.parametrize("name", ["signsgd", "topk"])
def test_loco_wants_a_size_of_what_was_lost(name):
    """A vote, or a sum without magnitudes, has none."""
    node = yaml_node("compressor", name) | {"error_feedback": "loco"}
    if name == "topk":
        assert any(type(layer).__name__ == "LoCo" for layer in layers(wrapped_compressor(node).compressor))
        return
    with pytest.raises(ConfigError, match=r"error_feedback must be false, because the update is a .*, got loco"):
        wrapped_compressor(node)


def test_what_is_idle_warns():
    typed = {"compressor.residual_bits", "compressor.residual_momentum", "compressor.residual_reset"}
    options = ["compressor.residual_bits=8", "compressor.residual_momentum=0.5", "compressor.residual_reset=8"]
    found = composed.warnings(composed.cfg("compressor=qsgd", *options, "workers=4"), typed)
    assert sorted(found) == [
        "compressor.residual_bits has no effect here: compressor.error_feedback is false",
        "compressor.residual_momentum has no effect here: compressor.error_feedback is not loco",
        "compressor.residual_reset has no effect here: compressor.error_feedback is not loco",
    ]
    assert not composed.warnings(
        composed.cfg("compressor=topk", "compressor.error_feedback=loco", *options, "workers=4"), typed
    )


def test_distributed_data_parallel_has_no_hook_for_them():
    comm = ("compressor=powersgd", "comm=gloo", "comm.engine=ddp", "workers=2")
    said = sentence(*comm, "compressor.error_feedback=loco")
    assert "compressor.error_feedback with comm.engine=ddp must be true or false: torch's hooks have no LoCo" in said
    eight = ["compressor.residual_bits=8", "compressor.residual=aggregate", "compressor.start_step=2"]
    assert "compressor.residual_bits with comm.engine=ddp must be 32" in sentence(*comm, *eight)


def test_reports_tell_them_apart():
    said = {
        "TopK 10 %, LoCo": ["compressor.error_feedback=loco"],
        "TopK 10 %, 8-bit residual": ["compressor.residual_bits=8"],
        "TopK 10 %": [],
    }
    for text, options in said.items():
        assert label(composed.cfg("compressor=topk", *options)) == text


def test_a_residual_beyond_its_type_is_refused_with_its_name():
    from accordion_bench.compressors.compressor import NonFinite

    setup = setup_of("topk", workers=2, error_feedback=True, residual_bits=8)
    xs_W = gradients(workers=2).tensors
    xs_W[3][1].flatten()[5] = 1e300  # no float32
    with pytest.raises(NonFinite, match=r"worker 1 .* b is not finite"):
        setup.exchange(xs_W, StepInfo(setup.plan, 0, 1.0, LATE))

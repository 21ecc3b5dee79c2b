"""The conformance kit: a compressor of somebody else passes, and each kind of mistake is caught by the right check."""

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from accordion_bench import conformance
from accordion_bench.codecs import packed_codes
from accordion_bench.compressors.compressor import Exchanged, subtract_
from accordion_bench.compressors.description import with_claims
from accordion_bench.compressors.oneshot import NonFiniteRow, OneShot
from accordion_bench.conformance import __main__ as command
from accordion_bench.conformance import randomness
from accordion_bench.conformance.placement import check_devices, check_placement
from tests.kit.processes import forked
from tests.kit.rounding import uniforms


def owed(outcome: conformance.Outcome) -> None:
    """Fail or skip with the outcome's sentence."""
    if outcome.status == "n/a":
        pytest.skip(outcome.text)
    assert outcome.status == "pass", outcome.text


class EverySecond(OneShot):
    """Keeps entries 0, 2, 4, ... of every tensor, as float32."""

    description = replace(OneShot.description, collective_reason="its author has not thought about sums")

    def message_bytes(self, spec, level):
        return 4 * ((spec.numel + 1) // 2)

    def encode(self, x_R, spec, level, ctx, keys):
        return x_R[:, ::2].float().clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def decode(self, message_R, spec, level, ctx):
        rows_R = torch.zeros(len(message_R), spec.numel, device=message_R.device)
        rows_R[:, ::2] = message_R.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return rows_R


class Alone(EverySecond):
    """Works in one process only."""

    def encode(self, x_R, *args):
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("boom\nand more")
        return super().encode(x_R, *args)


class Never(EverySecond):
    """Works nowhere."""

    def encode(self, *args):
        raise ValueError("boom")


def _variance_of_rounded(compressor, x_R, spec, level, ctx):
    step_R = x_R.abs().amax(1, keepdim=True) / 4
    share_R = (x_R / step_R).frac().abs()
    return (step_R.square() * share_R * (1 - share_R)).sum(1)


class Rounded(OneShot):
    """Rounds to a multiple of the tensor's largest entry / 4, at random: unbiased."""

    description = with_claims(OneShot.description, variance=_variance_of_rounded)
    traits = replace(OneShot.traits, unbiased=True)

    def message_bytes(self, spec, level):
        return 4 + spec.numel

    def encode(self, x_R, spec, level, ctx, keys):
        step_R = x_R.abs().amax(1, keepdim=True).float() / 4
        if not step_R.isfinite().all():
            raise NonFiniteRow(int((~step_R.isfinite()).any(1).nonzero()[0]))
        noise_R = torch.stack([self.noise(key, spec.numel) for key in keys]).to(x_R.device)
        codes_R = (x_R / step_R.clamp_min(1e-38) + noise_R).floor().to(torch.int8)
        return torch.cat([step_R.view(torch.uint8), codes_R.view(torch.uint8)], dim=1)

    def noise(self, key, count):
        return uniforms(key, 0, count)

    def decode(self, message_R, spec, level, ctx):
        step_R = message_R[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return message_R[:, 4:].contiguous().view(torch.int8) * step_R


THIRD_PARTY = [EverySecond, Rounded]


@pytest.mark.sample(7)
@pytest.mark.parametrize("check", [c for c in conformance.CHECKS if c is not check_placement], ids=conformance.name_of)
@pytest.mark.parametrize("cls", THIRD_PARTY)
def test_a_compressor_of_two_functions_passes(cls, check):
    owed(conformance.run(check, conformance.from_class(cls)))


WRAPPED = [
    {"error_feedback": True},
    {"error_feedback": True, "residual_units": "parameter", "worker_momentum": True},
    {"error_feedback": True, "collective": "two_way"},
    {"error_feedback": "ef21"},
]


@pytest.mark.sample(7)
@pytest.mark.parametrize("check", [c for c in conformance.CHECKS if c is not check_placement], ids=conformance.name_of)
@pytest.mark.parametrize("options", WRAPPED, ids=str)
def test_it_passes_in_every_wrapper(options, check):
    owed(conformance.run(check, conformance.from_class(EverySecond, **options)))


# ---- mistakes


def test_a_trait_beside_the_traits_is_refused():
    with pytest.raises(TypeError, match=r"Careless.unbiased is a trait; write traits = replace\(..., unbiased=...\)"):

        class Careless(EverySecond):
            unbiased = True


class Sum(EverySecond):
    def exchange(self, xs_W, ctx, state, comm):
        out = super().exchange(xs_W, ctx, state, comm)
        return Exchanged([update * comm.workers for update in out.update], out.subtract_sent_)


class AnotherReconstruction(EverySecond):
    """The sender subtracts what it had, not what the others decode."""

    def exchange(self, xs_W, ctx, state, comm):
        return Exchanged(super().exchange(xs_W, ctx, state, comm).update, lambda targets_W: subtract_(targets_W, xs_W))


class BitPerByte(OneShot):
    """Signs that claim to be packed."""

    traits = replace(OneShot.traits, scaled=False, reduces="other")

    def message_bytes(self, spec, level):
        return (spec.numel + 7) // 8

    def encode(self, x_R, spec, level, ctx, keys):
        bad_R = ~x_R.isfinite().all(1)
        if bad_R.any():
            raise NonFiniteRow(int(bad_R.nonzero()[0]))
        return (x_R < 0).to(torch.uint8)

    def decode(self, message_R, spec, level, ctx):
        return 1.0 - 2.0 * message_R


class HidesNaN(BitPerByte):
    def encode(self, x_R, spec, level, ctx, keys):
        return packed_codes.pack_bits(x_R < 0)

    def decode(self, message_R, spec, level, ctx):
        return 1.0 - 2.0 * packed_codes.unpack_bits(message_R.contiguous(), spec.numel).float()


class Overflows(EverySecond):
    """Multiplies by the norm and divides by it again."""

    def encode(self, x_R, spec, level, ctx, keys):
        norm_R = x_R.float().norm(dim=1, keepdim=True).square().clamp_min(1e-38)
        return super().encode(x_R / norm_R * norm_R, spec, level, ctx, keys)


class DividesByZero(EverySecond):
    def encode(self, x_R, spec, level, ctx, keys):
        largest_R = x_R.abs().amax(1, keepdim=True)
        return super().encode(x_R / largest_R * largest_R, spec, level, ctx, keys)


class GlobalNoise(Rounded):
    def noise(self, key, count):
        return torch.rand(count)


class Seeds(EverySecond):
    def encode(self, x_R, spec, level, ctx, keys):
        torch.manual_seed(0)
        return super().encode(x_R, spec, level, ctx, keys)


class RoundsDown(Rounded):
    def noise(self, key, count):
        return uniforms(key, 0, count) * 0.9


class LastIsLost(Rounded):
    def decode(self, message_R, spec, level, ctx):
        rows_R = super().decode(message_R, spec, level, ctx)
        rows_R[:, -1] = 0
        return rows_R


class OneNoiseForAll(Rounded):
    def keys(self, ctx, name, workers, purpose=""):
        return super().keys(ctx, name, [0] * len(workers), purpose)


class TheSameNoiseAgain(Rounded):
    def noise(self, key, count):
        return uniforms(5, 0, count)


class Optimistic(Rounded):
    description = with_claims(Rounded.description, variance=lambda *args: 0.8 * _variance_of_rounded(*args))


class Promising(EverySecond):
    description = with_claims(EverySecond.description, contraction=lambda compressor, spec, level: 0.75)


class Remembers(EverySecond):
    """Error feedback of its own that no checkpoint sees."""

    def __init__(self):
        self.last = {}

    def exchange(self, xs_W, ctx, state, comm):
        ps_W = [x + 0.5 * self.last.get(spec.name, 0) for spec, x in zip(ctx.specs, xs_W, strict=True)]
        self.last = {spec.name: x.clone() for spec, x in zip(ctx.specs, xs_W, strict=True)}
        return super().exchange(ps_W, ctx, state, comm)


class Consumes(EverySecond):
    def exchange(self, xs_W, ctx, state, comm):
        out = super().exchange(xs_W, ctx, state, comm)
        for x_W in xs_W:
            x_W.zero_()
        return out


class ByPosition(EverySecond):
    """Sends less of the tensors that come later."""

    def exchange(self, xs_W, ctx, state, comm):
        return super().exchange([x_W / (1 + i) for i, x_W in enumerate(xs_W)], ctx, state, comm)


class FirstWorkerTwice(EverySecond):
    def exchange(self, xs_W, ctx, state, comm):
        first = [x_W * torch.arange(comm.workers, 0, -1).view(-1, *[1] * (x_W.ndim - 1)) for x_W in xs_W]
        return super().exchange(first, ctx, state, comm)


class AlwaysGathers(EverySecond):
    def pays(self, spec, level, workers):
        return True


class Narrow(EverySecond):
    def exchange(self, xs_W, ctx, state, comm):
        out = super().exchange(xs_W, ctx, state, comm)
        return Exchanged([update.half() for update in out.update], out.subtract_sent_)


class Replayed(EverySecond):
    """Says that a GPU may repeat it, and is right."""

    traits = replace(EverySecond.traits, replays=True)


class Frozen(Replayed):
    """A number of the host that changes from step to step: a replay has that of the capture."""

    def exchange(self, xs_W, ctx, state, comm):
        return super().exchange([x_W / (1 + ctx.step) for x_W in xs_W], ctx, state, comm)


class ReadsBetween(Replayed):
    """The host reads a number of the device."""

    def encode(self, x_R, spec, level, ctx, keys):
        return super().encode(x_R if x_R.abs().max().item() < 1e30 else x_R / 2, spec, level, ctx, keys)


class MovesState(Replayed):
    """Its state is a new tensor after each exchange."""

    def init(self, specs, comm, like):
        return {spec.name: {"seen": torch.zeros((), device=like.device)} for spec in specs}

    def exchange(self, xs_W, ctx, state, comm):
        self.kept = [*getattr(self, "kept", []), *(entries["seen"] for entries in state.values())]
        for entries in state.values():
            entries["seen"] = entries["seen"] + 1
        return super().exchange(xs_W, ctx, state, comm)


MISTAKES = [
    (Frozen, "replays"),
    (ReadsBetween, "replays"),
    (MovesState, "replays"),
    (Sum, "mean"),
    (Sum, "identical"),
    (AnotherReconstruction, "mean"),
    (AnotherReconstruction, "telescopes"),
    (AnotherReconstruction, "estimates"),
    (BitPerByte, "payload"),
    (HidesNaN, "non_finite"),
    (Overflows, "extremes"),
    (DividesByZero, "zero"),
    (GlobalNoise, "global_rng"),
    (GlobalNoise, "same_key"),
    (Seeds, "global_rng"),
    (RoundsDown, "unbiased"),
    (LastIsLost, "unbiased"),
    (OneNoiseForAll, "draws"),
    (TheSameNoiseAgain, "draws"),
    (Optimistic, "variance"),
    (Promising, "contraction"),
    (Remembers, "state"),
    (Remembers, "probe"),
    (Consumes, "inputs"),
    (ByPosition, "order"),
    (FirstWorkerTwice, "permutation"),
    (FirstWorkerTwice, "draws"),
    (AlwaysGathers, "wire"),
    (Narrow, "extremes"),
]
CHECKS = {conformance.name_of(check): check for check in conformance.CHECKS}


@pytest.mark.parametrize(("cls", "name"), MISTAKES, ids=[f"{cls.__name__}-{name}" for cls, name in MISTAKES])
def test_mistakes_are_caught(cls, name):
    outcome = conformance.run(CHECKS[name], conformance.from_class(cls))
    assert outcome.status == "fail", outcome.text
    assert not outcome.text.startswith("stops with"), outcome.text


@pytest.mark.parametrize("options", [{}, {"error_feedback": True}], ids=str)
def test_what_is_replayed_has_the_bits_of_eager_exchanges(options):
    outcome = conformance.run(CHECKS["replays"], conformance.from_class(Replayed, **options))
    assert outcome == conformance.Outcome("replays", "pass", "4 replays have the bits of eager exchanges")


def test_harmless_checks_do_not_cry():
    """A mistake is reported where it is, not everywhere."""
    for cls, names in ((Sum, "payload wire inputs state order"), (HidesNaN, "inputs state order same_key zero")):
        for name in names.split():
            outcome = conformance.run(CHECKS[name], conformance.from_class(cls))
            assert outcome.status == "pass", outcome


def test_the_check_of_devices_compares():
    """Where no GPU is, the CPU with itself."""
    for cls in THIRD_PARTY:
        assert check_devices(conformance.from_class(cls), device="cpu") == "0.00% of the entries differ"


# ---- the statistics


@pytest.mark.sample(2)
@pytest.mark.parametrize("dependent", [False, True])
def test_the_test_of_unbiasedness_rejects_as_rarely_as_it_says(monkeypatch, dependent):
    """Of 300 unbiased methods about none is rejected, whether coordinates are independent or all share one noise."""
    x = torch.cat([x.view(-1) for x in randomness._input()])
    rejected = 0
    for trial in range(300):
        generator = torch.Generator().manual_seed(trial)
        noise_T = torch.randn(256, 1 if dependent else len(x), generator=generator, dtype=torch.float64)
        monkeypatch.setattr(randomness, "_draws", lambda make, level, draws_T=x + noise_T: draws_T)
        try:
            randomness.check_unbiased(conformance.from_class(Rounded))
        except AssertionError:
            rejected += 1
    assert rejected <= 1


# ---- the command line


def test_processes_that_fail_say_so_in_the_table_and_nowhere_else(capfd):
    outcome = conformance.run(check_placement, conformance.from_class(Alone))
    assert outcome.status == "fail" and "\n" not in outcome.text
    assert outcome.text == (
        "the processes end with [1, 1, None, None]: rank 0 has lost another one; rank 1 stops with ValueError: boom"
    )
    with forked():
        assert conformance.run(check_placement, conformance.from_class(Never)).text == "stops with ValueError: boom"
    time.sleep(1)  # for what children would still print
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err and not multiprocessing.active_children()


def test_the_command_prints_a_line_per_property(capsys, monkeypatch):
    monkeypatch.setattr(conformance, "CHECKS", [c for c in conformance.CHECKS if c is not check_placement])
    assert command.main(["compressor=bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [conformance.name_of(check) for check in conformance.CHECKS]
    assert {line.split()[1] for line in lines} == {"pass", "n/a"}
    assert command.main(["compressor._target_=tests.conformance.test_conformance.Sum"]) == 1
    told = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert told["mean"] == "fail" and told["payload"] == "pass"
    assert command.main(["compressor=tpok"]) == 2
    assert "compressor=topk" in capsys.readouterr().err

"""Every codec that has kernels gives the messages and sums that torch gives without them.

Most gradients here are small whole numbers times a power of two: sums of their magnitudes and squares have no rounding
in float64, in any order, so that norms are equal to the bit, and with them everything that hangs on norms.

Tensor suffixes: W workers, A senders, R rows of a sum.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.compressors.assemble import Wrapped
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.conformance.subject import Setup, from_yaml, levels_of, plain
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels, keyed_rng

LENGTHS = (1, 7, 8, 9, 39, 40, 41, 0, 4095, 4096, 4097, 20481)
SPECS = [TensorSpec(f"x{n}", (n,)) for n in LENGTHS] + [TensorSpec("matrix", (33, 5, 7)), TensorSpec("wide", (3, 4099))]
WORKERS = 3
ULP = torch.finfo(torch.float32).eps
# what the files do not say: options by which other loops run
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "qsgd": [
        {"levels": [-1, -0.3, -0.05, 0.05, 0.3, 1], "bits": None},
        {"bucket_size": None},
        {"bucket_size": 1000},
        {"bucket_size": 1000, "balanced": True},
    ],
    "int8": [{"rounding": "nearest"}],
    "natural": [{"exponent_bits": 7}],
    "terngrad": [{"clip": None}],
    "fp4": [{"bucket_size": None}, {"bucket_size": 1000}],
    "topk": [{"count": "floor"}, {"chunk": 8}, {"chunk": 64, "value_bits": 2}],
}


class Case(NamedTuple):
    """A compressor at a level, with options of its own."""

    name: str
    options: dict[str, Any]
    level: float | None

    def wrapped(self) -> Wrapped:
        """Without error feedback and momentum."""
        return plain(from_yaml(self.name, **self.options))

    def setup(self, specs: Sequence[TensorSpec] = SPECS) -> Setup:
        """In an exchange."""
        return Setup(self.wrapped(), self.level, WORKERS, specs, torch.float32)


def cases_of(name: str) -> list[Case]:
    """As the file says it; then at other levels, and with other options."""
    others = [Case(name, {}, level) for level in levels_of(from_yaml(name), more=True)[1:]]
    return [Case(name, {}, None), *others, *(Case(name, options, None) for options in OPTIONS.get(name, []))]


def parametrized(cases: list[Case]) -> pytest.MarkDecorator:
    """Those that only change options are slow."""
    marked = [
        case if case == Case(case.name, {}, None) else pytest.param(case, marks=pytest.mark.slow) for case in cases
    ]
    return pytest.mark.parametrize("case", marked, ids=named)


def named(case: Case) -> str:
    return " ".join([case.name, *map(str, case.options.values()), *([] if case.level is None else [f"{case.level:g}"])])


MADE = [(case, case.wrapped().compressor) for name in yaml_files("compressor") for case in cases_of(name)]
every_case = parametrized([case for case, made in MADE if "cpu" in made.traits.kernels])
every_one_shot = parametrized(
    [case for case, made in MADE if "cpu" in made.traits.kernels and isinstance(made, OneShot)]
)


@pytest.fixture(autouse=True)
def numba_is_there():
    if not kernels.installed():
        pytest.skip("numba is not installed")


class Both:
    """What is computed with kernels, and again without."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, compute):
        found = []
        for there in (True, False):
            with self.monkeypatch.context() as patched:
                patched.setattr(kernels, "installed", lambda there=there: there)
                found.append(compute())
        return found


@pytest.fixture
def both(monkeypatch) -> Both:
    return Both(monkeypatch)


def whole_numbers(spec: TensorSpec, workers: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small ones [W, ...], heavy-tailed, times 2^-10."""
    generator = keyed_rng.generator("whole numbers", spec.name, workers)
    drawn = (torch.randn(workers, *spec.shape, generator=generator) ** 3 * 100).clamp(-1000, 1000).round()
    return (drawn * 2.0**-10).to(dtype)


class Sent(NamedTuple):
    """What a one-shot compressor sends of some tensors."""

    codec: OneShot
    specs: list[TensorSpec]
    levels: list[float]
    ctx: Context

    def message(self, rows_W: list[Tensor]) -> list[Tensor]:
        """The messages of each tensor."""
        found = self.codec.encode_all(rows_W, self.specs, self.levels, self.ctx, range(len(rows_W[0])))
        if not isinstance(found, Tensor):
            return [own for of_tensor in found for own in of_tensor]
        pairs = zip(self.specs, self.levels, strict=True)
        return list(found.split([self.codec.message_bytes(spec, level) for spec, level in pairs], dim=1))

    def reference(self, rows_W: list[Tensor]) -> list[Tensor]:
        """The same, by `encode`, tensor by tensor."""
        workers, made = range(len(rows_W[0])), list[Tensor]()
        for x_W, spec, level in zip(rows_W, self.specs, self.levels, strict=True):
            found = self.codec.encode(x_W.clone(), spec, level, self.ctx, self.codec.keys(self.ctx, spec.name, workers))
            made += [found] if isinstance(found, Tensor) else found
        return made

    def sums(self, message: Any, before: list[Tensor], alpha: float = 1.0, divisor: int = 1) -> list[Tensor]:
        """Sums [R, N] of before and all messages."""
        sums_R = [x_R.clone() for x_R in before]
        self.codec.add_all_(dict(enumerate(sums_R)), message, self.specs, self.levels, self.ctx, alpha, divisor)
        return sums_R


def sent_by(case: Case, specs: Sequence[TensorSpec] = SPECS) -> Sent:
    setup = case.setup(specs)
    codec, ctx = setup.compressor, setup.context()
    assert isinstance(codec, OneShot)
    own = [(s, v) for s, v in zip(ctx.specs, ctx.levels, strict=True) if v is not None and codec.compresses(s, v)]
    if not own:
        pytest.skip("at this level everything travels whole")
    return Sent(codec, [spec for spec, _ in own], [level for _, level in own], ctx)


def rows(specs: list[TensorSpec], workers: int = WORKERS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [whole_numbers(spec, workers, dtype).flatten(1) for spec in specs]


@every_one_shot
@pytest.mark.parametrize("kind", ["float32", "float64", "not whole"])
def test_messages_are_equal_bit_for_bit(case, kind, both):
    """Also of numbers that are not whole: sums in float64 give the same float32 but once in a million."""
    sent = sent_by(case)
    rows_W = rows(sent.specs, dtype=torch.float64 if kind == "float64" else torch.float32)
    if kind == "not whole":
        rows_W = [x_W.sin() for x_W in rows_W]
    mine, _ = both(lambda: sent.message(rows_W))
    _, reference = both(lambda: sent.reference(rows_W))
    assert [k for k, own in enumerate(mine) if not torch.equal(own, reference[k])] == []
    assert len(mine) == len(reference)


@every_one_shot
def test_messages_made_without_kernels_stand_for_the_same(case, both):
    """They may have other bits behind the last code of a tensor."""
    sent = sent_by(case)
    rows_W = rows(sent.specs)
    made = both(lambda: sent.codec.encode_all(rows_W, sent.specs, sent.levels, sent.ctx, range(WORKERS)))
    mine, others = (sent.sums(message, [torch.zeros_like(x_W) for x_W in rows_W]) for message in made)
    assert all(torch.equal(own, theirs) for own, theirs in zip(mine, others, strict=True))


@every_one_shot
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_sums_are_equal_up_to_two_ulp(case, dtype, both):
    """Of six senders, as one row and as three; an ulp is float32's of the magnitudes that have been added up."""
    sent = sent_by(case)
    message = sent.codec.encode_all(rows(sent.specs, 6), sent.specs, sent.levels, sent.ctx, range(6))
    parts = [own_A.abs() for own_A in sent.sums(message, [torch.zeros(6, spec.numel) for spec in sent.specs])]
    for count in (1, 3):
        zeros = [torch.zeros(count, spec.numel, dtype=dtype) for spec in sent.specs]
        found = both(functools.partial(sent.sums, message, zeros, divisor=6))
        for own, theirs, parts_A in zip(*found, parts, strict=True):
            added = parts_A.unflatten(0, (-1, count)).sum(0)
            assert (6 * (own - theirs).abs() <= 2 * ULP * added).all()


@every_one_shot
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_what_is_taken_out_of_residuals_is_equal_bit_for_bit(case, dtype, both):
    """Each worker's own message, of what it was to send."""
    sent = sent_by(case)
    before = rows(sent.specs, dtype=dtype)
    message = sent.codec.encode_all(before, sent.specs, sent.levels, sent.ctx, range(WORKERS))
    mine, theirs = both(functools.partial(sent.sums, message, [x_W / 7 for x_W in before], alpha=-1.0))
    assert all(torch.equal(own, other) for own, other in zip(mine, theirs, strict=True))


@every_case
def test_whole_exchanges_are_equal_up_to_two_ulp(case, both):
    """Updates and what every worker has contributed, through all collectives; also of what is no one-shot method."""

    def exchanged() -> list[Tensor]:
        setup = case.setup()
        updates, sent_W = setup.contributions([whole_numbers(spec, WORKERS) for spec in SPECS])
        return [*updates, *sent_W]

    for own, theirs in zip(*both(exchanged), strict=True):
        if own.numel():
            assert (own - theirs).abs().max() <= 2 * ULP * theirs.abs().max()


@every_one_shot
def test_threads_change_nothing(case, monkeypatch):
    """Messages and sums are equal bit for bit, however small the threads' shares."""
    from accordion_bench.tensors.kernels import threads

    specs = [TensorSpec("long", (5, 20011)), TensorSpec("short", (40,)), TensorSpec("middle", (4097,))]
    sent = sent_by(case, specs)
    rows_W = [x_W.sin() for x_W in rows(sent.specs)]  # norms are rounded, too
    monkeypatch.setattr(threads, "LEAST", 1)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            message = sent.codec.encode_all(rows_W, sent.specs, sent.levels, sent.ctx, range(WORKERS))
            sums_R = sent.sums(message, [torch.full((1, spec.numel), 0.1) for spec in sent.specs])
            found.append([*sent.message(rows_W), *sums_R])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@every_one_shot
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_has_no_code_is_refused_with_the_same_error(case, bad, both):
    """The same row is named: worker x tensors + tensor."""
    sent = sent_by(case)
    rows_W = rows(sent.specs)
    at = max(range(len(sent.specs)), key=lambda k: sent.specs[k].numel)
    rows_W[at][1, 4000] = bad

    def refused() -> str:
        with pytest.raises(NonFiniteRow) as caught:
            sent.message(rows_W)
        return str(caught.value)

    mine, reference = both(refused)
    assert mine == reference and f"row {len(sent.specs) + at} " in mine


# ---- the trait


@pytest.mark.parametrize("name", list(yaml_files("compressor")))
def test_the_trait_says_whether_kernels_are_asked_for(name, monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "installed", lambda: bool(asked.append(name)))
    setup = Case(name, {}, None).setup()
    setup.contributions([whole_numbers(spec, WORKERS) for spec in SPECS])
    assert bool(asked) == ("cpu" in setup.compressor.traits.kernels)

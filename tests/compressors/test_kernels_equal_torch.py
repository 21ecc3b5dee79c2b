"""Every exchange with kernels gives the updates that it gives without them: through all collectives.

Most gradients here are small whole numbers times a power of two: sums of their magnitudes and squares have no rounding
in float64, in any order, so that norms are equal to the bit, and with them everything that hangs on norms.

Tensor suffixes: W workers, A senders, R rows of a sum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from accordion_bench.codecs.engine import Engine
from accordion_bench.compressors.assemble import CompressorSetup
from accordion_bench.conformance.subject import Setup, from_yaml, levels_of, plain
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels, keyed_rng, sixteen_bits

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

    def wrapped(self) -> CompressorSetup:
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
every_case = parametrized([case for case, made in MADE if "cpu" in made.description.kernels])


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


# ---- the trait


@pytest.mark.parametrize("name", list(yaml_files("compressor")))
def test_the_trait_says_whether_kernels_are_asked_for(name, monkeypatch):
    from accordion_bench.codecs.compiled import Compiled
    from accordion_bench.codecs.on_cpu import OnCpu

    asked = []

    def told(kind, operation):
        own = getattr(kind, operation)
        return lambda *given: (asked.append(operation), own(*given))[1]

    for kind in (Compiled, OnCpu):
        for operation in set(vars(kind)) & set(dir(Engine)):
            if callable(getattr(kind, operation)) and not operation.startswith("_"):
                monkeypatch.setattr(kind, operation, told(kind, operation))
    monkeypatch.setattr(sixteen_bits, "_kernels_for", lambda *given: asked.append("casts"))  # None: no kernels
    setup = Case(name, {}, None).setup()
    setup.contributions([whole_numbers(spec, WORKERS) for spec in SPECS])
    assert bool(asked) == ("cpu" in setup.compressor.description.kernels), asked

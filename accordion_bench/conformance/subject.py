"""Subject of a conformance check: factories of compressors, and an exchange that is ready to run (`Setup`).

Tensor suffixes: W local workers.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import CompressorSetup, wrapped_compressor
from accordion_bench.compressors.compressor import Compressor, Context
from accordion_bench.compressors.error_feedback import FLOATS, EightBits, ErrorFeedback
from accordion_bench.compressors.probe import next_payload_bytes, payload_bytes
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.options.instantiate import Config, target
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import Blocks

# shapes of a small network: repeated ones, 1-D tensors, a wide and a narrow matrix, odd sizes, a single entry
SPECS = (
    TensorSpec("stem", (8, 3, 3, 3)),
    TensorSpec("a", (16, 8, 3, 3)),
    TensorSpec("a.bias", (16,)),
    TensorSpec("b", (16, 8, 3, 3)),
    TensorSpec("c", (16, 8, 3, 3)),
    TensorSpec("head", (10, 64)),
    TensorSpec("odd", (5, 23)),
    TensorSpec("tiny", (1, 1)),
)


def gradients(
    specs: Sequence[TensorSpec] = SPECS, workers: int = 4, step: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return gradients [W, ...]: a constant mean of rank 4 with decaying singular values, noise per worker and step.

    All values are representable in float32, whatever the dtype. The caller may modify the tensors.
    """
    drawn, blocks = _drawn(tuple(specs), workers, step, dtype), Blocks(specs, workers, torch.zeros((), dtype=dtype))
    for block, values in zip(blocks.blocks, drawn.blocks, strict=True):
        block.copy_(values)
    return blocks.tensors


@functools.lru_cache(maxsize=64)
def _drawn(specs: tuple[TensorSpec, ...], workers: int, step: int, dtype: torch.dtype) -> Blocks:
    lasting, noise = keyed_rng.generator("conformance"), keyed_rng.generator("conformance", step)
    blocks = Blocks(specs, workers, torch.zeros((), dtype=dtype))
    for x_W in blocks.tensors:
        n, m = x_W.shape[1], x_W[0].numel() // max(x_W.shape[1], 1)
        left = torch.randn(n, 4, generator=lasting) * 3.0 ** -torch.arange(4)
        common = left @ torch.randn(4, m, generator=lasting)
        x_W.copy_(common.view(x_W.shape[1:]) + 0.05 * torch.randn(x_W.shape, generator=noise))
    return blocks


def repeated(xs: Sequence[Tensor], workers: int) -> list[Tensor]:
    """Expand tensors [...] to the same copy on every worker, [W, ...]."""
    return [x.expand(workers, *x.shape).clone() for x in xs]


def _spike(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    x = 1e-3 * torch.randn(shape, generator=generator)
    x.flatten(1)[:, 5] = 10.0
    return x


def _heavy(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    normal, chi = torch.randn(shape, generator=generator), torch.randn(2, *shape, generator=generator)
    return normal / chi.square().mean(0).sqrt()


KINDS: dict[str, Callable[[torch.Generator, tuple[int, ...]], Tensor]] = {
    "Gaussian": lambda generator, shape: torch.randn(shape, generator=generator),
    "heavy-tailed": _heavy,
    "one spike": _spike,
}


def sample_distribution(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random numbers [W, ...] from one of the distributions in KINDS."""
    return KINDS[kind](keyed_rng.generator("conformance", kind), shape).to(dtype)


@functools.cache
def real_gradients(workers: int = 4, steps: int = 8) -> tuple[tuple[TensorSpec, ...], tuple[Tensor, ...]]:
    """Return (specs, gradients [W, ...] in float32) of a residual network on digits, after some steps of SGD."""
    from accordion_bench.datasets.images import Digits
    from accordion_bench.models.resnet import ResNet

    data = Digits().load("", seed=0, device=torch.device("cpu"))
    with keyed_rng.seeded(keyed_rng.key("conformance", "model")):
        model = ResNet(1, 10, widths=[8, 16], blocks=[1, 1])
    named = list(model.named_parameters())
    order = torch.randperm(data.train_size, generator=keyed_rng.generator("conformance", "order"))
    blocks = Blocks([TensorSpec(name, tuple(p.shape)) for name, p in named], workers, torch.zeros(()))
    for step in range(steps + 1):
        for worker in range(workers):
            start = 32 * (step * workers + worker)
            images, labels = data.train_batch(order[start : start + 32])
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            found = torch.autograd.grad(loss, [p for _, p in named])
            for x_W, gradient in zip(blocks.tensors, found, strict=True):
                x_W[worker] = gradient
        if step < steps:
            with torch.no_grad():
                for (_, p), x_W in zip(named, blocks.tensors, strict=True):
                    p.sub_(x_W.mean(0), alpha=0.1)
    return tuple(TensorSpec(name, tuple(p.shape)) for name, p in named), tuple(blocks.tensors)


Maker = Callable[..., CompressorSetup]
"""Factory of new wrapped compressors; keyword arguments override options of the wrappers (`error_feedback=False`)."""

Check = Callable[[Maker, float | None], str]
"""check(make, level) returns the measurement as text; raises AssertionError with a sentence, or NotApplicable."""

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
CANDIDATES = (0.01, 0.1, 0.5, 0.99, 1, 2, 4, 8, 1000)  # tried on every knob; refused values are skipped
LATE = 1000.0  # epoch of all checks, after any warm-up of the level


class NotApplicable(Exception):
    """The compressor does not claim this property; the message gives the reason."""


def demand(holds: Any, sentence: str) -> None:
    """Raise AssertionError(sentence) unless `holds`; unlike `assert`, also under python -O."""
    if not holds:
        raise AssertionError(sentence)


@dataclass(frozen=True, eq=False)
class Make:
    """Factory of the compressor of a config group, with an optimizer for methods that use its momentum."""

    node: Config
    optimizer: Config = field(default_factory=lambda: dict(SGD))

    def __call__(self, **options: Any) -> CompressorSetup:
        """Return a new compressor with options replaced; `worker_momentum=False` also sets momentum to 0."""
        without = {"momentum": 0.0, "nesterov": False} if options.get("worker_momentum") is False else {}
        return wrapped_compressor({**self.node, **options}, {**self.optimizer, **without})


def from_class(cls: type[Compressor], **options: Any) -> Make:
    """Return a factory for an importable class, with options of its constructor and of the wrappers."""
    return with_optimizer({"_target_": f"{cls.__module__}.{cls.__qualname__}", **options})


def from_yaml(name: str, **options: Any) -> Make:
    """Return a factory for compressor/<name>.yaml in `conf` or an added config folder, with some options replaced."""
    return with_optimizer({**read_options(yaml_files("compressor")[name]), **options})


def with_optimizer(node: Config) -> Make:
    """Return a factory with the required optimizer, or SGD; with momentum, unless the compressor has its own."""
    beside = target(node, "compressor").description.requires.get("optimizer")
    if isinstance(beside, str):
        return Make(node, read_options(yaml_files("optimizer")[beside]))
    make = Make(node)
    try:
        make()
    except ValueRefused as refused:
        if not refused.key.startswith("optimizer."):
            raise
        return Make(node, {**SGD, "momentum": 0.0, "nesterov": False})
    return make


def from_overrides(overrides: Sequence[str]) -> Make:
    """Return a factory for overrides of the main command: `compressor=topk compressor.density=0.01`."""
    from accordion_bench.config.compose import compose

    cfg = compose(overrides)
    return Make(cfg["compressor"], cfg["optimizer"])


def plain(make: Maker) -> CompressorSetup:
    """Return a compressor without error feedback and momentum: its update depends on this step's gradients only."""
    return make(error_feedback=False, worker_momentum=False)


def levels_of(make: Maker, more: bool = False) -> list[float | None]:
    """Return the levels to test: the configured one, the pair, and with `more` those of CANDIDATES that are valid."""
    compressor = make().compressor
    if compressor.traits.knob is None:
        return [None]
    values: dict[float | None, None] = {compressor.level: None, **dict.fromkeys(compressor.traits.pair)}
    for value in CANDIDATES if more else ():
        try:
            values[compressor.check_level("level", value)] = None
        except ConfigError:
            continue
    return list(values)


def layers(compressor: Compressor) -> Iterator[Compressor]:
    """Yield the compressor and those it wraps, from outermost to innermost."""
    yield compressor
    while isinstance(compressor, Wrapper):
        compressor = compressor.inner
        yield compressor


def bare(compressor: Compressor) -> Compressor:
    """Return the innermost compressor."""
    return [*layers(compressor)][-1]


def draws(compressor: Compressor) -> str:
    """Return who draws random numbers: `worker` (each its own), `shared` (all the same) or "" (no random numbers)."""
    if compressor.description.claims.draws:
        return compressor.description.claims.draws
    return "worker" if compressor.traits.unbiased else ""


class Setup:
    """One compressor in one exchange, with all tensors at one level.

    Args:
        level: value of the knob; None = as configured.
        workers: number of workers in this process, unless `comm` is given.
        dtype, device: of the gradients.
        seed: key of random numbers.
        start_step: first compressed step; steps before it are dense.
    """

    def __init__(
        self,
        wrapped: CompressorSetup,
        level: float | None = None,
        workers: int = 4,
        specs: Sequence[TensorSpec] = SPECS,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        comm: Comm | None = None,
        seed: int = 3,
        start_step: int = 0,
    ) -> None:
        wrapped = replace(wrapped, start_step=start_step)
        self.compressor = compressor = wrapped.compressor
        self.comm = comm or Comm(workers, device=device)
        value = compressor.level if level is None else level
        ladder = Ladder(compressor.traits.knob or "", () if value is None else (value,))
        like = torch.zeros((), dtype=dtype, device=device)
        self.exchange = Exchange(compressor, specs, ladder, self.comm, like, SendOptions(seed, **wrapped.for_exchange))
        self.plan = Plan(dict.fromkeys(levelled(compressor, self.exchange.sent), 0), 1)
        if compressor.start_step and not start_step:
            self._past_dense_steps(specs, dtype)

    def _past_dense_steps(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> None:
        """Take a dense step that no ledger counts, for methods that start with dense steps."""
        local, wide = self.comm.local_workers, torch.float32 if dtype.itemsize == 2 else dtype
        ordered = sorted(specs, key=lambda spec: spec.name)  # makes the gradients independent of the order
        drawn = gradients(ordered, self.comm.workers, dtype=wide)
        means = {spec.name: x_W.mean(0).to(self.comm.device) for spec, x_W in zip(ordered, drawn, strict=True)}
        xs_W = repeated([means[spec.name] for spec in specs], local)
        alone = Comm(local)  # a communicator on the CPU, whose clock needs no device driver
        alone.device = self.comm.device
        ctx = self.context()
        dense = replace(ctx, levels=[None] * len(ctx.levels))
        with torch.no_grad():
            self.compressor.exchange(self.exchange.as_sent(xs_W), dense, self.exchange.state, alone)

    def __call__(self, xs_W: Sequence[Tensor], step: int = 0, lr: float = 1.0) -> list[Tensor]:
        """Exchange gradients [W, ...] and return the updates [...]."""
        return self.exchange(xs_W, StepInfo(self.plan, step, lr, LATE))

    def context(self, step: int = 0, lr: float = 1.0) -> Context:
        return self.exchange.context(StepInfo(self.plan, step, lr, LATE))

    def contributions(
        self, xs_W: Sequence[Tensor], step: int = 0, lr: float = 1.0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return (updates [...], each worker's contribution to them [W, ...]) of each tensor as it is sent."""
        sent_W = self.exchange.as_sent(xs_W)
        out = self.compressor.exchange(sent_W, self.context(step, lr), self.exchange.state, self.comm)
        minus_W = [torch.zeros_like(x_W, memory_format=torch.contiguous_format) for x_W in sent_W]
        out.subtract_sent_(dict(enumerate(minus_W)))
        return list(out.update), [-target_W for target_W in minus_W]

    def payload(self, step: int = 0) -> int:
        """Return the predicted payload of the next exchange in bytes, summed over workers, in this turn."""
        return self._predicted(next_payload_bytes, step, self.exchange.state)

    def mean_payload(self, step: int = 0) -> int:
        """Return the predicted payload in bytes, summed over workers, as a mean over all turns of a cycle."""
        return self._predicted(payload_bytes, step)

    def _predicted(self, bytes_of: Callable[..., float], step: int, *state: Any) -> int:
        ctx, workers = self.context(step), self.comm.workers
        pairs = zip(ctx.specs, ctx.levels, strict=True)
        return round(workers * sum(bytes_of(self.compressor, spec, level, workers, *state) for spec, level in pairs))

    def snapshot(self) -> dict[str, dict[str, Any]]:
        return {
            name: {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}
            for name, entries in self.exchange.state.items()
        }


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate all entries to one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def max_relative_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference between two lists of tensors, relative to the largest entry of the second."""
    pairs = list(zip(ours, theirs, strict=True))
    largest = max((float(b.abs().max()) for _, b in pairs if b.numel()), default=0.0)
    apart = max((float((a - b).abs().max()) for a, b in pairs if b.numel()), default=0.0)
    return apart / largest if largest else apart


def same_state(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> str | None:
    """Return where two states differ; None if they are bitwise equal."""
    if ours.keys() != theirs.keys():
        return f"the entries {sorted(ours.keys() ^ theirs.keys())}"
    for name, entries in ours.items():
        if entries.keys() != theirs[name].keys():
            return f"the keys of {name}: {sorted(entries.keys() ^ theirs[name].keys())}"
        for key, value in entries.items():
            other = theirs[name][key]
            equal = same_bits(value, other) if isinstance(value, Tensor) else value == other
            if not equal:
                return f"{name}.{key}"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=7.25), b.nan_to_num(nan=7.25))


def kept_residuals(setup: Setup) -> tuple[dict[int, Tensor], bool]:
    """Return the residual of each tensor [W, ...], by index, and whether it is stored in eight bits."""
    ctx, state = setup.context(), setup.exchange.state
    for layer in layers(setup.compressor):
        if isinstance(layer, ErrorFeedback):
            kept_W = layer.residual_storage.read(ctx, state, torch.zeros((), dtype=torch.float64))
            return kept_W, isinstance(layer.residual_storage, EightBits)
    found = enumerate(state.get(spec.name, {}).get(FLOATS) for spec in ctx.specs)
    return {i: e_W for i, e_W in found if e_W is not None}, False

"""Training loops of a user, and the same training by hand, without hooks in autograd."""

import copy
import functools
import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion_bench as ab
from accordion_bench.attaching.checked_arguments import choose
from accordion_bench.attaching.own_parameters import trained_specs
from accordion_bench.attaching.users_optimizer import hand_over, options_of
from accordion_bench.comm.collectives import Comm
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.methods.build import build_methods
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import RunFacts
from accordion_bench.position import StepInfo
from tests.kit.by_hand import in_group
from tests.kit.processes import together

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "topk": {"compressor": "topk", "density": 0.5},
    "powersgd": {"compressor": "powersgd", "rank": 1},
    "signum": {"compressor": "signum"},
    "dgc": {"compressor": {"dgc": {"density": 0.3, "warmup_epochs": 0}}},
}
OWNERS = ("signum", "dgc")  # compressors that take the step themselves


class Net(nn.Sequential):
    """Two hidden layers, one of them normalised: matrices and vectors, all reached by the loss."""

    def __init__(self) -> None:
        layers = [nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
        super().__init__(*layers)


def net(dtype: torch.dtype = torch.float32, make: Callable[[], nn.Module] = Net) -> nn.Module:
    """Return a network that is the same on all workers."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32, size: int = 4) -> tuple[Tensor, Tensor]:
    """Return this worker's samples of a step: inputs [size, 6], targets [size, 3]."""
    draws = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(size, 6, generator=draws).to(dtype), torch.randn(size, 3, generator=draws).to(dtype)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x, y = batch(step, dtype)
    return (model(x) - y).square().mean()


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, **options)


def closure_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    dtype: torch.dtype = torch.float32,
    after: Callable[[], None] = lambda: None,
) -> Callable[[], Tensor]:
    """Return a closure for `optimizer.step`, which computes gradients and returns the loss with its graph.

    Args:
        after: called after the backward pass.
    """

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step, dtype)
        loss.backward()
        after()
        return loss

    return closure


class ByHand:
    """A copy of a model whose gradients are exchanged after the backward pass.

    Without a compressor, torch's all-reduce exchanges each gradient; with one, an `Exchange` exchanges them tensor by
    tensor in the model's order.

    Args:
        model: the model to copy.
        optimizer: function that creates the optimizer of a model.
        group: process group of the exchange; None = all processes.
        options: `compressor` and its options.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer, self.group = optimizer(self.model), group
        self.named = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        self.compressor: Any = None
        self.steps = 0
        if options:
            self._take(**options)

    def _take(self, compressor: Any, **options: Any) -> None:
        own = options_of(self.optimizer)
        chosen = choose(compressor, None, "every_step", own, options, ())
        methods = build_methods(chosen, RunFacts(1, dist.get_world_size()), 1)
        self.compressor = methods.wrapped.compressor
        hand_over(self.optimizer, self.compressor)
        specs = trained_specs(self.model)
        comm = Comm(1, dist.get_world_size(), dist.get_rank())
        like = self.named[0][1]
        self.plan = methods.plan_for(specs)
        sending = SendOptions(**methods.wrapped.for_exchange)
        self.exchange = Exchange(self.compressor, specs, methods.ladder, comm, like, sending)

    @torch.no_grad()
    def mean(self) -> None:
        """Exchange the gradients and replace each by the update; a missing gradient counts as zero."""
        gradients = [torch.zeros_like(param) if param.grad is None else param.grad for _, param in self.named]
        if self.compressor is None:
            for (_, param), gradient in zip(self.named, gradients, strict=True):
                param.grad = gradient / dist.get_world_size(self.group)
                dist.all_reduce(param.grad, group=self.group)
            return
        lrs = self._rates()
        info = StepInfo(self.plan, self.steps, lrs[0] if len(set(lrs)) == 1 else lrs)
        self.updates = self.exchange([gradient.unsqueeze(0) for gradient in gradients], info)
        self.taken = self.exchange.steps_taken(info)
        for (_, param), update, taken in zip(self.named, self.updates, self.taken, strict=True):
            param.grad = torch.zeros_like(update) if taken else update

    def _rates(self) -> list[float]:
        """Return the learning rate of each parameter."""
        rates = {id(param): group["lr"] for group in self.optimizer.param_groups for param in group["params"]}
        return [rates[id(param)] for _, param in self.named]

    @torch.no_grad()
    def step(self) -> None:
        """Take the optimizer's step, or that of a compressor that takes it itself."""
        self.optimizer.step()
        self.steps += 1
        if self.compressor is None or not self.compressor.traits.optimizer.owns:
            return
        lrs = [1.0 for _ in self.named] if self.compressor.traits.optimizer.units == "parameter" else self._rates()
        for (_, param), update, lr, taken in zip(self.named, self.updates, lrs, self.taken, strict=True):
            if not taken:
                continue
            if len(set(lrs)) == 1:
                param.sub_(update, alpha=lr)
            else:  # with the rounding of scheme and training
                param.sub_(update * lr)

    def train(self, steps: Sequence[int], loss: Callable[[nn.Module, int], Tensor] = loss_of) -> None:
        """Train with the simplest loop."""
        for step in steps:
            self.optimizer.zero_grad()
            loss(self.model, step).backward()
            self.mean()
            self.step()


def attached(
    model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """Return the result of `ab.attach`, and the optimizer."""
    made = optimizer(model)
    return ab.attach(model, made, **options), made


def same(ours: nn.Module, theirs: nn.Module) -> None:
    """Assert that all parameters and buffers are equal, bit for bit."""
    pairs = zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True)
    different = {name: float((a - b).abs().max()) for (name, a), b in pairs if not torch.equal(a, b)}
    assert not different, different


def close(ours: nn.Module, theirs: nn.Module, within: float = 1e-12) -> None:
    """Assert that all parameters and buffers are equal up to the order of summation."""
    pairs = zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True)
    far = {name: float((a - b).abs().max()) for (name, a), b in pairs if not torch.allclose(a, b, 0, within)}
    assert not far, far


def same_on_all(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Assert that every worker has the same parameters."""
    for name, param in model.named_parameters():
        theirs = param.detach().clone()
        dist.broadcast(theirs, group=group, group_src=0)
        assert torch.equal(theirs, param), name


Case = Callable[[], None]


def each(case: Callable[..., None], *axes: Iterable[Any]) -> list[Case]:
    """Return a case `case(*values)` per combination of the axes' values; the last axis varies fastest."""
    return [functools.partial(case, *values) for values in itertools.product(*axes)]


def play(folder: Path, cases: Sequence[Case], workers: int = 2) -> None:
    """Run cases one after another in one group of processes, which must all succeed.

    Raises:
        AssertionError: a case failed; the message contains the error of each process.
    """
    try:
        together(workers, _played, str(folder), workers, list(cases))
    except AssertionError:
        told = [file.read_text() for file in sorted(folder.glob("failed.*"))]
        raise AssertionError("\n".join(["a case has failed", *told])) from None


def _played(rank: int, folder: str, workers: int, cases: Sequence[Case]) -> None:
    with in_group(rank, f"{folder}/store", workers):
        for case in cases:
            try:
                case()
                dist.barrier()
            except BaseException:
                name = getattr(case, "func", case).__name__, *getattr(case, "args", ())
                (Path(folder) / f"failed.{rank}").write_text(f"{name}, rank {rank}:\n{traceback.format_exc()}")
                raise SystemExit(1) from None


def refused(sentence: str, kind: type[Exception] = ConfigError) -> Any:
    """Assert that the body of the context raises `kind` with this text."""
    return pytest.raises(kind, match=sentence)

"""PowerSGD beside an epfml-style one: interleaved rounds, one thread, one worker, no network; prints Markdown.

    python -m scripts.bench.powersgd
    python -m scripts.bench.powersgd --package FOLDER   # beside the package itself: FOLDER holds its `powersgd`

The package is github.com/epfml/powersgd (the wheel of this name on PyPI is empty). Every arm receives new gradients and
adds them to its residuals; for the other arms autograd accumulates them into .grad, whose time is the row `accumulation
alone`.
"""

import importlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context
from accordion_bench.compressors.error_feedback import ErrorFeedback
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.models.resnet import ResNet18
from accordion_bench.plan import TensorSpec
from accordion_bench.runs.folder import environment
from scripts.bench.arms import as_a_run
from scripts.bench.harness import command_line, interleaved, print_head, print_row, quartiles, ratio, spread

Step = Callable[[], object]


class BatchedTwin:
    """Plain implementation of the package's algorithm: stacked by shape, half of the power iteration per iteration.

    Args:
        shapes: shapes of the tensors.
        rank: columns of P and Q.
        iterations: iterations per step; 2 correspond to the paper's step.
        min_compression_rate: as in `PowerSGD`.
    """

    def __init__(self, shapes: list[torch.Size], rank: int, iterations: int, min_compression_rate: float = 2) -> None:
        self.iterations, self.count = iterations, 0
        self.groups: dict[tuple[int, int], list[int]] = {}
        self.dense: list[int] = []
        for i, shape in enumerate(shapes):
            n, m = shape[0], shape.numel() // shape[0]
            if len(shape) > 1 and rank * (n + m) * min_compression_rate < n * m:
                self.groups.setdefault((n, m), []).append(i)
            else:
                self.dense.append(i)
        generator = torch.Generator().manual_seed(0)
        draw = lambda rows, count: torch.randn(count, rows, rank, generator=generator)  # noqa: E731
        self.Ps = [draw(n, len(ids)) for (n, _), ids in self.groups.items()]
        self.Qs = [draw(m, len(ids)) for (_, m), ids in self.groups.items()]

    def aggregate(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return the averages; `gradients` become the residuals."""
        out: list[Tensor] = [torch.empty(0)] * len(gradients)
        errors = [
            torch.stack([gradients[i].view(shape) for i in ids]) for shape, ids in self.groups.items()
        ]  # fmt: skip
        sums = [torch.zeros_like(error) for error in errors]
        for _ in range(self.iterations):
            left = self.count % 2 == 0
            known, wanted = (self.Ps, self.Qs) if left else (self.Qs, self.Ps)
            for g, (error, total) in enumerate(zip(errors, sums, strict=True)):
                view, total = (error, total) if left else (error.mT, total.mT)
                known[g] = torch.linalg.qr(known[g]).Q
                wanted[g] = view.mT @ known[g]
                view.baddbmm_(known[g], wanted[g].mT, alpha=-1)
                total.baddbmm_(known[g], wanted[g].mT)
            self.count += 1
        for ids, error, total in zip(self.groups.values(), errors, sums, strict=True):
            for g, i in enumerate(ids):
                out[i] = total[g].reshape(gradients[i].shape)
                gradients[i].view(error[g].shape).copy_(error[g])
        flat = torch.cat([gradients[i].view(-1) for i in self.dense])
        for i, mean in zip(self.dense, flat.split([gradients[i].numel() for i in self.dense]), strict=True):
            out[i] = mean.view(gradients[i].shape)
            gradients[i].zero_()
        return out


def our_step(specs: list[TensorSpec], gradients: list[Tensor], rank: int) -> Step:
    """Return a step of error feedback, encoding and decoding by this project."""
    compressor, comm = ErrorFeedback(PowerSGD(rank=rank)), Comm(1)
    state = compressor.init(specs, comm, gradients[0])
    xs_W = [gradient[None] for gradient in gradients]
    context = Context(1, specs, [rank if spec.ndim > 1 else None for spec in specs])

    @torch.no_grad()
    def step() -> None:
        compressor.exchange(xs_W, context, state, comm)

    return step


def their_step(aggregate: Callable[[list[Tensor]], object], gradients: list[Tensor]) -> Step:
    """Return a step that accumulates into the stored residuals, as autograd does, then calls `aggregate`."""
    kept = [torch.zeros_like(gradient) for gradient in gradients]

    @torch.no_grad()
    def step() -> None:
        for residual, gradient in zip(kept, gradients, strict=True):
            residual.add_(gradient)
        aggregate(kept)

    return step


def package_arms(folder: str, gradients: list[Tensor], rank: int) -> dict[str, Step]:
    """Return the package's own PowerSGD at one and two iterations per step."""
    sys.path.insert(0, folder)
    package = importlib.import_module("powersgd")
    arms = {}
    for iterations in (1, 2):
        settings = package.Config(rank, 2, iterations, 0)
        arms[f"package, {iterations} per step"] = their_step(package.PowerSGD(gradients, settings).aggregate, gradients)
    return arms


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, rounds=20)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--package", help="folder that holds the package `powersgd`")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    as_a_run()
    with torch.device("meta"):
        specs = [TensorSpec(name, tuple(p.shape)) for name, p in ResNet18(3, 10).named_parameters()]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(spec.shape, generator=generator) for spec in specs]
    shapes = [gradient.shape for gradient in gradients]

    arms = {"ours": our_step(specs, gradients, arguments.rank)}
    for iterations in (1, 2):
        twin = BatchedTwin(shapes, arguments.rank, iterations)
        arms[f"twin, {iterations} per step"] = their_step(twin.aggregate, gradients)
    if arguments.package:
        arms |= package_arms(arguments.package, gradients, arguments.rank)
    arms["accumulation alone"] = their_step(lambda kept: None, gradients)
    times = interleaved(arms, arguments.rounds, steps=1)

    about = environment()
    print(f"commit {about['commit']}, {about['processor']}, {about['cpu_cores']} cores, torch {torch.__version__}")
    print(f"ResNet-18, {sum(spec.numel for spec in specs):,} parameters, rank {arguments.rank}, 1 thread\n")
    print_head("arm", "ms, median (quartiles)", "ours / arm, median (quartiles)")
    for name in arms:
        middle, low, high = (1000 * seconds for seconds in quartiles(times[name]))
        print_row(name, f"{middle:.1f} ({low:.1f} to {high:.1f})", spread(*ratio(times["ours"], times[name])))


if __name__ == "__main__":
    main()

"""Step times behind shaped links, every arm in one run: interleaved rounds, medians; prints Markdown.

    python -m scripts.bench.netlab                                   # 2 hosts: unshaped, 1 Gbit/s, 100 Mbit/s
    python -m scripts.bench.netlab --hosts 4 --rates 100mbit --arms dense ddp
    python -m scripts.bench.netlab --rates 100mbit --every-compressor
    python -m scripts.bench.netlab --rates 100mbit --arms "FSDP2, bf16" "FSDP2, int8" "FSDP2, int4"

Each host has one process with one worker and one thread; ResNet-18 for CIFAR, 8 samples per worker and step.
Needs root (network namespaces).
"""

import statistics
import sys
from collections.abc import Callable

from accordion_bench.options.conf_dir import yaml_files
from scripts.bench import hosts
from scripts.bench.harness import command_line, print_head, print_row, quartiles, ratio, spread, where

MODEL = ["model=resnet18", "dataset=synthetic", "batch_size=8"]
ALONE = "no communication"
ARMS = {
    ALONE: [],
    "DDP in a plain loop": [],
    "DDP": ["comm.engine=ddp"],
    "DDP, bf16 hook": ["comm.engine=ddp", "compressor=bf16"],
    "DDP, PowerSGD hook, one bucket": [
        *("comm.engine=ddp", "compressor=powersgd", "compressor.rank=2"),
        *("compressor.residual=aggregate", "compressor.start_step=2"),
    ],
    "epfml/powersgd": [],
    "dense": [],
    "dense, no overlap": ["comm.overlap=false"],
    "bf16": ["compressor=bf16"],
    "PowerSGD": ["compressor=powersgd", "compressor.rank=2"],
    "PowerSGD, one bucket": ["compressor=powersgd", "compressor.rank=2", "comm.bucket_cap_mb=1000"],
    "PowerSGD, no overlap": [
        *("compressor=powersgd", "compressor.rank=2", "comm.bucket_cap_mb=1000", "comm.overlap=false"),
    ],
}
GATHERS = "FSDP2, gradients stay"  # what the parameters cost
BASELINE = "FSDP2, bf16"
SHARDED: dict[str, list[str]] = {
    GATHERS: [],
    "FSDP2": [],
    BASELINE: [],
    "FSDP2, none": ["none"],
    "FSDP2, fp8": ["fp8"],
    "FSDP2, int8": ["int8"],
    "FSDP2, int4": ["qsgdinf"],
}
Build = Callable[[str, list[str], int, int], Callable[[], None]]
# (ours, theirs, largest ratio aimed at)
TARGETS = [
    ("dense", "DDP", 1.03),
    ("bf16", "DDP, bf16 hook", 1.02),
    ("PowerSGD", "DDP", 1.0),
    ("PowerSGD", "DDP, PowerSGD hook, one bucket", 1.0),
    ("PowerSGD", "epfml/powersgd", 1.0),
    ("PowerSGD", ALONE, 1.25),
]


# of which the gathering of parameters is a part, however gradients are reduced
SHARDED_TARGETS = [(f"FSDP2, {code}", BASELINE, 1 / 3) for code in ("fp8", "int8", "int4")]


# ---- inside a host


def epfml(trainer, model) -> Callable[[], None]:
    """Return a step of Vogels' own package, whose aggregator receives the gradients after the backward pass.

    The error that it writes into the gradients is not accumulated, which saves it an addition.
    """
    from powersgd import Config, PowerSGD

    from scripts.bench.arms import plain_step

    params = list(model.parameters())
    config = Config(rank=2, min_compression_rate=2, num_iters_per_step=1, start_compressing_after_num_steps=0)
    powersgd = PowerSGD(params, config)

    def aggregate() -> None:
        gradients = [p.grad for p in params]
        for p, mean in zip(params, powersgd.aggregate(gradients), strict=True):
            p.grad = mean

    return plain_step(trainer, model, aggregate)


def of_shards(name: str, codes: list[str], rank: int, processes: int) -> Callable[[], None]:
    """Return one step of the plain loop with an FSDP2 model that is one group; shards are gathered once per step.

    There are 2 samples per worker, because the traffic is compared.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import accordion_bench as ab
    from accordion_bench.comm.collectives import Comm
    from scripts.bench.arms import plain_step, trainer_for

    trainer = trainer_for([*MODEL, "batch_size=2"], Comm(1, processes, rank))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if name.endswith("bf16") else None)
    mesh = init_device_mesh("cpu", (processes,))
    model = fully_shard(trainer.axis.model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for code in codes:
        ab.attach_shards(model, code)
    if name == GATHERS:
        model.set_custom_reduce_scatter(Staying())  # type: ignore[arg-type]
    return plain_step(trainer, model)


class Staying:
    """Replacement of a reduce-scatter: returns a process's own gradients of its shards."""

    def allocate(self, size, *, dtype, device):
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def arm(name: str, overrides: list[str], rank: int, processes: int) -> Callable[[], None]:
    """Return one training step of an arm."""
    import torch

    from accordion_bench.comm.collectives import Comm
    from scripts.bench.arms import our_step, plain_step, trainer_for

    if name in SHARDED:
        return of_shards(name, overrides, rank, processes)
    here = Comm(1) if name == ALONE else Comm(1, processes, rank)
    trainer = trainer_for([*MODEL, *overrides], here)
    if name == "DDP in a plain loop":
        wrapped = torch.nn.parallel.DistributedDataParallel(trainer.axis.model, broadcast_buffers=False)
        return plain_step(trainer, wrapped)
    if name == "epfml/powersgd":
        return epfml(trainer, trainer.axis.model)

    return our_step(trainer)


# ---- outside


def compressors() -> dict[str, list[str]]:
    """Return every compressor with its defaults."""
    names = sorted(yaml_files("compressor"))
    momentum, adamw = ["optimizer.momentum=0"], ["optimizer=adamw"]
    beside = {**dict.fromkeys(("demo", "dgc", "signum"), momentum), "dion": adamw}
    return {name: [f"compressor={name}", *beside.get(name, [])] for name in names}


def main(
    module: str = "scripts.bench.netlab",
    arms: dict[str, list[str]] = ARMS,
    targets: list[tuple[str, str, float]] = TARGETS,
    build: Build = arm,
    doc: str | None = __doc__,
) -> None:
    """Parse the command line, run the hosts, print the tables.

    Args:
        module: module that runs inside each host, with the same arguments.
        arms: arms by name, with overrides.
        targets: (ours, theirs, largest accepted ratio).
        build: function that makes an arm's training step inside a host.
        doc: text of --help.
    """
    parser = command_line(doc, rounds=9)
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "100mbit"])
    parser.add_argument("--slow-host", action="append", default=[])
    parser.add_argument("--arms", nargs="+", default=list(arms))
    parser.add_argument("--every-compressor", action="store_true")
    hosts.add_arguments(parser)
    args = parser.parse_args()
    chosen = compressors() if args.every_compressor else {name: {**arms, **SHARDED}[name] for name in args.arms}
    if args.inside:
        made = lambda name, rank, processes: build(name, chosen[name], rank, processes)  # noqa: E731
        hosts.inside(args, chosen, made, hosts.seconds_of_the_slowest)
        return

    found: dict[str, dict[str, list[float]]] = {}
    sent: dict[str, float] = {}
    for rate in args.rates:
        told = hosts.in_hosts(module, args.hosts, rate, args.slow_host)
        found[rate] = {name: [one["seconds"] for one in rounds] for name, rounds in told["rounds"].items()}
        sent |= {name: statistics.median(one["megabytes"] for one in rounds) for name, rounds in told["rounds"].items()}
        for name, why in told["failed"].items():
            print(f"{name} was left out at {rate}: {why}", file=sys.stderr)

    print(f"{where()}\n")
    names = list(dict.fromkeys(name for times in found.values() for name in times))
    print(f"Seconds per step, median of {args.rounds} rounds (quartiles); {args.hosts} hosts.\n")
    print_head("arm", "MB that a host sends in a step", *found)
    for name in names:
        print_row(name, f"{sent[name]:.1f}", *(spread(*quartiles(times[name])) for times in found.values()))
    pairs = (
        [(name, "none", 1.0) for name in names if name != "none"]
        if args.every_compressor
        else [*targets, *SHARDED_TARGETS]
    )
    print("\nRatios, round by round: median (quartiles).\n")
    print_head("ours / theirs", "aimed at", *found)
    for ours, theirs, target in pairs:
        if ours in names and theirs in names:
            cells = []
            for times in found.values():
                median, lower, upper = ratio(times[ours], times[theirs])
                cells.append(spread(median, lower, upper) + ("" if median <= target else " NO"))
            print_row(f"{ours} / {theirs}", f"{target:.3g}", *cells)
    if GATHERS in names:
        print(f"\nReductions alone, what a step takes beside that of `{GATHERS}`: seconds, and over those of bf16.\n")
        print_head("arm", *found)
        for name in (name for name in names if name in SHARDED and name != GATHERS):
            cells = []
            for times in found.values():
                alone = {arm: [a - b for a, b in zip(times[arm], times[GATHERS], strict=True)] for arm in times}
                cells.append(spread(*quartiles(alone[name])))
                if BASELINE in alone:
                    cells[-1] += f"; {spread(*ratio(alone[name], alone[BASELINE]))}"
            print_row(name, *cells)


if __name__ == "__main__":
    main()

"""Third-party hooks of DistributedDataParallel beside ours: bytes by the interface, and step times.

    python -m scripts.bench.hooks                                # 2 hosts at 100 Mbit/s, into results/hooks
    python -m scripts.bench.hooks --rate 1gbit --hosts 4
    PYTHONPATH=CHECKOUT python -m scripts.bench.hooks            # of epfml/powersgd, which is left out without it

All arms are in one run, in interleaved rounds; each host has one process with one worker and one thread. Torch's hooks
are selected by `comm.hook`, like any other hook. epfml's package is no hook: it takes the gradients after the backward
pass, in a plain training loop. It needs root (network namespaces).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench import hosts
from scripts.bench.harness import command_line, quartiles, save, spread, where

TORCHS = "torch.distributed.algorithms.ddp_comm_hooks"
OPTIONS = "matrix_approximation_rank:2,start_powerSGD_iter:2"
EPFML = "epfml/powersgd, rank 2"


def hook(path: str, *options: str) -> list[str]:
    """Return the overrides of an arm with a hook of torch's."""
    return ["comm.engine=ddp", f"comm.hook={TORCHS}.{path}", *options]


STATE = f"comm.hook_state={TORCHS}.powerSGD_hook:PowerSGDState"
ARMS = {
    "DDP, allreduce_hook": hook("default_hooks:allreduce_hook"),
    "dense": [],
    "DDP, fp16_compress_hook": hook("default_hooks:fp16_compress_hook"),
    "fp16": ["compressor=fp16"],
    "DDP, bf16_compress_hook": hook("default_hooks:bf16_compress_hook"),
    "bf16": ["compressor=bf16"],
    "DDP, powerSGD_hook, rank 2": hook("powerSGD_hook:powerSGD_hook", STATE, f"comm.hook_options={{{OPTIONS}}}"),
    EPFML: [],
    "PowerSGD, rank 2": ["compressor=powersgd", "compressor.rank=2"],
}


# ---- inside a host


def arm(name: str, model: str, rank: int, processes: int) -> tuple[Callable[[], None], Any]:
    """Return one training step of an arm, and the trainer whose ledger counts it."""
    from accordion_bench.comm.collectives import Comm
    from scripts.bench.arms import our_step, trainer_for
    from scripts.bench.netlab import epfml

    overrides = [f"model={model}", "dataset=synthetic", "batch_size=8", *ARMS[name]]
    trainer = trainer_for(overrides, Comm(1, processes, rank))
    if name != EPFML:
        return our_step(trainer), trainer
    trainer.comm.ledger.complete = False
    return epfml(trainer, trainer.axis.model), trainer


def built(name: str, model: str, rank: int, processes: int) -> Callable[[int], dict[str, float | None]]:
    """Return a function that measures an arm over some steps."""
    import torch
    import torch.distributed as dist

    from accordion_bench.network.meter import Interface

    step, trainer = arm(name, model, rank, processes)
    interface = Interface("eth0")

    def measured(count: int) -> dict[str, float | None]:
        """Return the seconds of a step on the slowest host, and its bytes: sent by an interface, and in the ledger."""
        dist.barrier()
        start, sent, counted = time.perf_counter(), interface.sent(), trainer.comm.ledger.columns()["wire_bytes"]
        for _ in range(count):
            step()
        seconds = time.perf_counter() - start
        dist.barrier()  # then all of them have left
        took = torch.tensor([seconds, interface.sent() - sent], dtype=torch.float64) / count
        wire = None if counted is None else (trainer.comm.ledger.columns()["wire_bytes"] - counted) / count
        slowest = took[:1].clone()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(took)
        return {"seconds": float(slowest), "sent": float(took[1]) / processes, "wire": wire}

    return measured


# ---- outside


def table(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return one row per arm, as Markdown."""
    from accordion_bench.options.units import human_bytes

    lines = ["| arm | sent by the interface, a step | counted by the ledger | seconds, a step |", "|---|--:|--:|--:|"]
    for name, rounds in found.items():
        sent, _, _ = quartiles([one["sent"] for one in rounds])
        seconds = spread(*quartiles([one["seconds"] for one in rounds]))
        wire = rounds[-1]["wire"]
        counted = "not counted" if wire is None else human_bytes(wire)
        lines.append(f"| {name} | {human_bytes(sent)} | {counted} | {seconds} |")
    return lines


def main() -> None:
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("results/hooks"), help="for README.md and rounds.json")
    hosts.add_arguments(parser)
    args = parser.parse_args()
    if args.inside:
        made = lambda name, rank, processes: built(name, args.model, rank, processes)  # noqa: E731
        hosts.inside(args, args.arms, made, lambda measured, count: measured(count))
        return

    told = hosts.in_hosts("scripts.bench.hooks", args.hosts, args.rate)
    lines = [
        "# Hooks of others beside ours",
        "",
        f"{args.model} on synthetic images, 8 samples per worker and step; {args.hosts} hosts at {args.rate}, one "
        f"worker and one thread each; medians of {args.rounds} rounds (quartiles). `python -m scripts.bench.hooks`, "
        f"{where()}.",
        "",
        *table(told["rounds"]),
        "",
        "Sent by the interface: by one host's, mean over the hosts, with headers and acknowledgements. Counted: by "
        "arithmetic, of one worker's link; those of hooks, and of epfml's package, are not known from outside.",
        *(f"\n{name} was left out: {why}." for name, why in told["failed"].items()),
    ]
    save(args.out, "\n".join(lines), "rounds.json", told)
    print("\n".join(lines))


if __name__ == "__main__":
    main()

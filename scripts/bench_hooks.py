"""Hooks of DistributedDataParallel that others have written, beside ours: bytes by the interface, and step times.

    python -m scripts.bench_hooks                                # 2 hosts at 100 Mbit/s, into results/hooks
    python -m scripts.bench_hooks --rate 1gbit --hosts 4
    PYTHONPATH=CHECKOUT python -m scripts.bench_hooks            # of epfml/powersgd, which is left out without it

All arms in one run, in interleaved rounds; each host has one process with one worker and one thread. Torch's hooks are
named as anybody's are, by `comm.hook`; epfml's package is no hook: it takes the gradients after the backward pass, in
the loop that everyone writes. Needs root (network namespaces).
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TORCHS = "torch.distributed.algorithms.ddp_comm_hooks"
OPTIONS = "matrix_approximation_rank:2,start_powerSGD_iter:2"
EPFML = "epfml/powersgd, rank 2"


def hook(path: str, *options: str) -> list[str]:
    """The overrides of an arm with a hook of torch's."""
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
WARM_UP = 3  # steps: DistributedDataParallel arranges its buckets anew, hooks begin to compress


# ---- inside a host


def arm(name: str, model: str, rank: int, processes: int) -> tuple[Callable[[], None], Any]:
    """One training step of an arm, and the trainer whose ledger counts it."""
    from accordion_bench.comm.collectives import Comm
    from scripts.bench_arms import our_step, trainer_for
    from scripts.bench_netlab import epfml

    overrides = [f"model={model}", "dataset=synthetic", "batch_size=8", *ARMS[name]]
    trainer = trainer_for(overrides, Comm(1, processes, rank))
    if name != EPFML:
        return our_step(trainer), trainer
    trainer.comm.ledger.complete = False
    return epfml(trainer, trainer.axis.model), trainer


def inside(out: Path, chosen: list[str], model: str, rounds: int, seconds: float) -> None:
    """Time all arms in this host's process, and count its interface; the first host writes what was found."""
    import torch
    import torch.distributed as dist

    from accordion_bench.network.interface import Interface

    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    rank, processes, interface = dist.get_rank(), dist.get_world_size(), Interface("eth0")
    torch.set_num_threads(1)
    arms, failed = {}, {}
    for name in chosen:
        try:
            arms[name] = arm(name, model, rank, processes)
        except ImportError as error:
            failed[name] = str(error)

    def measured(name: str, count: int) -> dict[str, float | None]:
        """Seconds of a step on the slowest host; bytes of a step: sent by an interface, and as the ledger counts."""
        step, trainer = arms[name]
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

    for name in arms:
        measured(name, WARM_UP)
    counts: dict[str, int] = {}
    for name in arms:
        once = measured(name, 1)["seconds"]
        assert once is not None
        counts[name] = max(1, min(10, round(seconds / once)))
    found: dict[str, list[dict[str, float | None]]] = {name: [] for name in arms}
    for round_ in range(rounds):
        for name in list(arms) if round_ % 2 else list(arms)[::-1]:
            found[name].append(measured(name, counts[name]))
    if rank == 0:
        out.write_text(json.dumps({"rounds": found, "failed": failed}), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # the transports' threads and DistributedDataParallel's hooks need not be taken apart


# ---- outside


def table(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """One row per arm, as Markdown."""
    from accordion_bench.options.units import human_bytes
    from scripts.bench_arms import quartiles

    lines = ["| arm | sent by the interface, a step | counted by the ledger | seconds, a step |", "|---|--:|--:|--:|"]
    for name, rounds in found.items():
        sent, _, _ = quartiles([one["sent"] for one in rounds])
        median, lower, upper = quartiles([one["seconds"] for one in rounds])
        wire = rounds[-1]["wire"]
        counted = "not counted" if wire is None else human_bytes(wire)
        lines.append(f"| {name} | {human_bytes(sent)} | {counted} | {median:.3f} ({lower:.3f} to {upper:.3f}) |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one arm in one round, about")
    parser.add_argument("--out", type=Path, default=Path("results/hooks"), help="for README.md and rounds.json")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.inside, args.arms, args.model, args.rounds, args.seconds)
        return

    from accordion_bench.netlab import options
    from accordion_bench.netlab.hosts import Hosts
    from accordion_bench.report.render.markup import folded
    from accordion_bench.runs.environment import environment

    with tempfile.TemporaryDirectory() as folder, Hosts(args.hosts, options.rate(args.rate), {}) as hosts:
        out = Path(folder, "rounds.json")
        outcome = hosts.run([sys.executable, "-m", "scripts.bench_hooks", *sys.argv[1:], "--inside", str(out)])
        if not out.exists():
            sys.exit(f"a host failed ({outcome})")
        text = out.read_text(encoding="utf-8")
    told, about = json.loads(text), environment()
    lines = [
        "# Hooks of others beside ours",
        "",
        f"{args.model} on synthetic images, 8 samples per worker and step; {args.hosts} hosts at {args.rate}, one "
        f"worker and one thread each; medians of {args.rounds} rounds (quartiles). `python -m scripts.bench_hooks`, "
        f"commit {about['commit']}, {about['processor']}, {about['cpu_cores']} cores, {about['versions']}.",
        "",
        *table(told["rounds"]),
        "",
        "Sent by the interface: by one host's, mean over the hosts, with headers and acknowledgements. Counted: by "
        "arithmetic, of one worker's link; of hooks, and of epfml's package, nobody but these knows.",
        *(f"\n{name} was left out: {why}." for name, why in told["failed"].items()),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "README.md").write_text(folded("\n".join(lines)) + "\n", encoding="utf-8")
    (args.out / "rounds.json").write_text(text, encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

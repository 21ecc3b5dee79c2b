"""Command line of `python -m accordion_bench.advise`: predict whether compression saves time on a cluster."""

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from accordion_bench import output
from accordion_bench.advising.gpus import TOLD
from accordion_bench.options.advice import explain
from accordion_bench.processes.environment import sleep_while_waiting

DESCRIPTION = """Predict whether communicating less saves time on a cluster, in about a minute, without training.
Computation and the codec of each method are timed on this machine; links are modelled.

    python -m accordion_bench.advise model=imagenet_resnet50 workers=16 network=10gbit
    python -m accordion_bench.advise model=imagenet_resnet50 workers=16 network=10gbit gpu=h100
    python -m accordion_bench.advise model=lstm machines=8 workers_per_machine=4 network=1gbit network.inside=pcie4
    python -m accordion_bench.advise --timeline timeline.json workers=64 network=25gbit
    torchrun --nproc-per-node 1 --nnodes 2 ... -m accordion_bench.advise --probe

workers=W means W machines of one worker, or W / workers_per_machine machines. Steps are timed on this machine, unless
--timeline is given, or one of these options selects another device:

"""
SIMULATED = (
    *("slow", "slow_links", "outages", "outages_per_hour", "outage_seconds", "spread"),
    *("sync.quorum", "sync.grace", "steps", "seed"),
)
SEVERAL = ("runs", "methods", "simulate")  # options that take any number of words
DESCRIPTION += "\n".join(f"    {word:<15}{told}" for word, told in TOLD.items())
DESCRIPTION += """

All other overrides are those of python -m accordion_bench: model, dataset, batch_size, precision, device, threads,
optimizer, network."""


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one sentence, without a usage summary."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; type --help for all options\n")


def read(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Overrides are accepted anywhere, also after an option that takes several words."""
    args = _parser().parse_intermixed_args(argv)
    for name in SEVERAL:
        words = getattr(args, name) or []
        overrides = [word for word in words if _is_override(name, word)]
        args.overrides += overrides
        setattr(args, name, [word for word in words if word not in overrides])
    return args


def _is_override(option: str, word: str) -> bool:
    key, equals, _ = word.partition("=")
    if option == "simulate":
        return key not in SIMULATED
    return bool(equals) and not Path(word).exists()


def _parser() -> _Parser:
    parser = _Parser(
        "accordion_bench.advise", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="workers=16, network=10gbit, model=lstm, ...")
    add("--timeline", type=Path, metavar="FILE", help="times of a step from comm.timeline() of your own loop")
    add("--link", type=Path, metavar="FILE", help="link file written by --probe; replaces network=")
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="compare only these names of conf/compressor and conf/sync with the dense baselines",
    )
    add(
        "--seconds", type=float, metavar="S", help="approximate time for timing all methods (20), or for the probe (20)"
    )
    add("--runs", nargs="+", metavar="FOLDER", help="run folders from which to read accuracies")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for text, CSV, JSON and figures (a new one in results/advice_runs)",
    )
    add("--no-figures", action="store_true", help="draw nothing")
    add("--simulate", nargs="+", metavar="WHAT", help="also simulate late and lost workers: slow=3:2.0")
    add("--probe", action="store_true", help="time this cluster's link, under torchrun; writes --out link.json")
    add("--config-dir", metavar="FOLDER", help="folder with your own YAML files")
    return parser


@output.command
def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status: 2 for an error that the user can correct."""
    sleep_while_waiting()
    args = read(argv)
    try:
        output.progress("reading what was asked")
        from accordion_bench.cli import advice_command  # imported late: the import takes seconds

        advice_command.run(args)
    except KeyboardInterrupt:
        output.progress_over()
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        output.progress_over()
        print(sentence, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""python -m accordion_bench.runs.export RUN --dcp FOLDER: convert a checkpoint to torch.distributed.checkpoint."""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from accordion_bench import output
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import checkpoint
from accordion_bench.runs.saving import Damaged, checkpoints, none_readable, unexpected_content_message

DESCRIPTION = """Writes the newest checkpoint of a run as torch.distributed.checkpoint reads it, on any number of ranks.

    python -m accordion_bench.runs.export results/runs/RUN --dcp FOLDER

The folder then holds `model` (parameters that all workers have in common, buffers of worker 0), `optimizer.state` by
parameter name, and `position` (epoch, step, step_in_epoch)."""


@output.command
def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, or 2 for an invalid argument."""
    words = argparse.ArgumentParser(
        "accordion_bench.runs.export", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("run", type=Path, help="folder of a run with checkpoints")
    words.add_argument("--dcp", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")
    args = words.parse_args(argv)
    try:
        step = export(args.run, args.dcp)
    except ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2
    print(f"{args.dcp} holds step {step} of {args.run}")
    return 0


def export(run: Path, folder: Path) -> int:
    """Write the newest readable checkpoint; damaged ones are reported on standard error.

    Args:
        run: folder of the run.
        folder: output folder, new or empty; it is created.

    Returns:
        number of optimizer steps of the checkpoint.

    Raises:
        ConfigError: there is no checkpoint, none is readable, or the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--dcp must be a new or empty folder, got {folder}; type another one")
    found = checkpoints(run)
    if not found:
        raise ConfigError(f"RUN must be the folder of a run with a checkpoint, got {run}; type one of results/runs")
    problems: list[str] = []
    for path in found:
        try:
            shared, first = checkpoint.read(path, range(1))
        except Damaged as damaged:
            problems.append(f"{path.name} is damaged: {damaged}")
            continue
        for problem in problems:
            print(problem, file=sys.stderr)
        try:
            state = exported(shared, first)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(unexpected_content_message(path, error)) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # which warns that only one process saves, as intended
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        step: int = shared["step"]
        return step
    raise none_readable(run, problems)


def exported(shared: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return the exported part of a checkpoint.

    Args:
        shared: state shared by all workers.
        first: state of worker 0; with local steps its optimizer is exported.
    """
    optimizer = first["replica"]["optimizer"] if first["replica"] else shared["optimizer"]
    return {
        "model": {**shared["parameters"], **first["buffers"]},
        "optimizer": {"state": optimizer},
        "position": {key: shared[key] for key in ("epoch", "step", "step_in_epoch")},
    }


if __name__ == "__main__":
    raise SystemExit(main())

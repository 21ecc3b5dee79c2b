"""Cost of saving: seconds of one checkpoint beside those of an epoch, the frequency of the default, and how long
training stops if a thread writes (`checkpoint.background=true`).

    python -m scripts.bench.checkpoint [--models resnet8,resnet18] [--steps 3] [--saves 5] [--runs FOLDER]

Four workers run in one process with PowerSGD, whose residuals are the largest part of a checkpoint. The time of an
epoch of CIFAR-10 (391 steps of 4 x 32) or of digits is its number of steps times the median step. Prints a Markdown
table.
"""

import shutil
import statistics
import tempfile
from pathlib import Path

from accordion_bench.comm.collectives import Comm
from accordion_bench.config.compose import compose
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.background import Background
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.saving import BlockingWriter
from accordion_bench.training.saver import SHARE
from accordion_bench.training.trainer import Trainer
from scripts.bench.arms import as_a_run
from scripts.bench.harness import command_line, print_head, print_row, seconds_of

WORKERS = 4
CIFAR = ["dataset=synthetic", f"dataset.train_size={WORKERS * 32 * 8}", "dataset.test_size=64"]
EPOCHS = {"resnet8": ("digits", [], 12), "resnet18": ("CIFAR-10", CIFAR, 391)}  # data, options, steps


def measured(model: str, steps: int, saves: int, runs: Path) -> dict[str, float]:
    """Return the medians of step, save and stop (of training, if a thread writes) in seconds; MB of a checkpoint."""
    _, options, _ = EPOCHS[model]
    cfg = compose([f"model={model}", *options, "compressor=powersgd", f"workers={WORKERS}", "comm=simulated"])
    folder = RunFolder.create(str(runs), model, cfg)
    trainer = Trainer(RunConfig.from_dict(cfg), Comm(WORKERS), folder)
    trainer.begin_epoch()
    taken = [seconds_of(trainer.train_step) for _ in range(steps + 1)]
    writers = BlockingWriter(trainer.comm), Background(trainer.comm)
    saved, stops = [], []
    for _ in range(saves + 1):
        for writer, found in zip(writers, (saved, stops), strict=True):
            trainer.writer = writer
            found.append(seconds_of(trainer.save))
            writer.finish()
    path = trainer.save()
    trainer.writer.finish()
    assert path is not None
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    return {
        "step": statistics.median(taken[1:]),
        "save": statistics.median(saved[1:]),
        "most": max(saved[1:]),
        "stop": statistics.median(stops[1:]),  # the first one allocates the copy
        "first": stops[0],
        "size": size,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", default=",".join(EPOCHS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--runs", type=Path, help="a folder on the disk to measure; default: the temporary one")
    args = parser.parse_args(arguments)
    as_a_run()
    print_head(
        "model, epoch of",
        "epoch, s",
        "checkpoint, MB",
        "saving, s (most)",
        "of an epoch",
        "saved every",
        "share",
        "beside training, s (first)",
        "of saving",
    )
    for model in args.models.split(","):
        folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=args.runs))
        try:
            found = measured(model, args.steps, args.saves, folder)
        finally:
            shutil.rmtree(folder)
        data, _, count = EPOCHS[model]
        epoch, save = found["step"] * count, found["save"]
        every = max(1, -(-save / SHARE // epoch))
        took = [f"{epoch:.3g}", f"{found['size']:.3g}", f"{save:.3g} ({found['most']:.3g})"]
        share = f"{save / (every * epoch):.2%}"
        stop = [f"{found['stop']:.3g} ({found['first']:.3g})", f"{found['stop'] / save:.1%}"]
        print_row(f"{model}, {data}", *took, f"{save / epoch:.2%}", f"{every:.0f} epochs", share, *stop)


if __name__ == "__main__":
    main()

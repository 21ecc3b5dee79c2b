"""Cost of data beside a training step: ratios measured in one run, interleaved rounds, medians; prints Markdown.

    python -m scripts.bench.data            # all
    python -m scripts.bench.data batch      # time of a batch / time of a step on it
    python -m scripts.bench.data run        # data_seconds / seconds of short runs
    python -m scripts.bench.data folder     # images per second of an image folder, by number of processes

Times are CPU time of this process on one thread, so that a busy machine disturbs them less; `folder` is wall time.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

from accordion_bench.comm.collectives import Comm
from accordion_bench.config.components import build_components, build_model
from accordion_bench.config.compose import compose
from accordion_bench.datasets.image_folder import files_of
from accordion_bench.datasets.images import ImageData
from accordion_bench.datasets.pictures import FolderData, Views
from accordion_bench.run_config import RunConfig
from accordion_bench.tensors import keyed_rng
from scripts.bench.arms import as_a_run, trainer_for
from scripts.bench.harness import interleaved, line, ratio, run_benches

CPU = torch.device("cpu")
AUGMENTED = {
    "none": {"padding": 0, "flip": False},
    "crop, flip": {"padding": 4, "flip": True},
    "crop, flip, rotation 15, cutout 8": {"padding": 4, "flip": True, "rotation": 15.0, "cutout": 8},
}


def made_up(count: int, **augmentation) -> ImageData:
    """Return images of CIFAR's size and kind; their content does not affect the cost."""
    generator = keyed_rng.generator("bench")
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    pair = images, torch.randint(0, 10, (count,), generator=generator)
    return ImageData(pair, pair, [125.3, 123.0, 113.9], [63.0, 62.1, 66.7], seed=0, device=CPU, **augmentation)


def orders(count: int, batch: int) -> Iterator[torch.Tensor]:
    """Yield batches without end."""
    for _ in itertools.count():
        yield from torch.randperm(count).split(batch)[: count // batch]


def bench_batch(rounds: int) -> None:
    """Compare the next batch with forward and backward of resnet20 on it; also draw an epoch's augmentation."""
    cfg = compose(["model=resnet20", "dataset=cifar10"])
    for batch, (name, augmentation) in itertools.product((32, 128), AUGMENTED.items()):
        data, model = (
            made_up(50_000, **augmentation),
            build_model(cfg["model"], build_components(RunConfig.from_dict(cfg), 1).dataset),
        )
        batches = data.train_batches(0, orders(50_000, batch))
        x, y = next(batches)

        def step(model=model, x=x, y=y) -> None:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()

        arms = {"batch": lambda batches=batches: next(batches) and None, "step": step}
        times = interleaved(arms, rounds, steps=2, clock=time.process_time)
        median, lower, upper = ratio(times["batch"], times["step"])
        milliseconds = {arm: 1000 * statistics.median(of_arm) for arm, of_arm in times.items()}
        ours, setting = f"{milliseconds['batch']:.2f} of {milliseconds['step']:.0f} ms", f"batch {batch}, {name}"
        line("next batch / resnet20 step", setting, ours, median, 0.05, more=f" ({lower:.3f} to {upper:.3f})")
        draw = {"epoch": lambda data=data: data.begin_epoch(1)}
        draws = interleaved(draw, 5, steps=1, clock=time.process_time)
        epoch = 50_000 / batch * (milliseconds["batch"] + milliseconds["step"])
        drawing = 1000 * statistics.median(draws["epoch"])
        line("drawing an epoch's augmentation / the epoch", setting, f"{drawing:.1f} ms", drawing / epoch, 0.05)


def bench_run(rounds: int) -> None:
    """Report a run's own clock, by its columns; wall time."""
    for batch, (name, augmentation) in itertools.product((32, 128), AUGMENTED.items()):
        overrides = ["model=resnet20", "dataset=synthetic", f"batch_size={batch}", "compressor=none"]
        trainer = trainer_for(overrides, Comm(1))
        trainer.data = made_up(2048, **augmentation)
        trainer.begin_epoch()
        for _ in range(2048 // batch // 4):
            trainer.train_step()
        columns = trainer.clock.columns(True)
        share = columns["data_seconds"] / columns["seconds"]
        line("data_seconds / seconds of a run", f"resnet20, batch {batch}, {name}", "", share, 0.05)


def bench_folder(rounds: int) -> None:
    """Measure images per second of 256 images of 500 x 375 pixels, as photographs in ImageNet, without training."""
    with tempfile.TemporaryDirectory() as root:
        for i in range(256):
            noise = torch.rand(1, 3, 24, 32, generator=keyed_rng.generator("bench", i))
            picture = F.interpolate(noise, size=(375, 500), mode="bicubic").clamp(0, 1)[0].permute(1, 2, 0)
            folder = Path(root, f"class {i % 2}")
            folder.mkdir(exist_ok=True)
            Image.fromarray((255 * picture).byte().numpy()).save(folder / f"{i}.JPEG", quality=90)
        files = files_of(Path(root), Path(root))
        size = statistics.mean(file.stat().st_size for file in Path(root).glob("*/*")) / 1000
        for workers in (0, 1, 2):
            data = FolderData(Views(files, files, 224, True, 0), workers, CPU)
            list(data.train_batches(0, torch.arange(256).split(32)))
            start = time.perf_counter()
            for epoch in range(1, 3):
                list(data.train_batches(epoch, torch.arange(256).split(32)))
            speed = 512 / (time.perf_counter() - start)
            print(f"| images per second, 224 pixels of {size:.0f} kB JPEG | {workers} processes | {speed:.0f} | | | |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    as_a_run()
    run_benches({"batch": bench_batch, "run": bench_run, "folder": bench_folder}, __doc__, rounds=15)

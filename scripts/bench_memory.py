"""What it saves that a process keeps the memory it has freed: training and evaluation of images, one thread.

    python -m scripts.bench_memory [--rounds 5] [--images 1024]

Prints a Markdown table: images per second of the processor with freed memory given back (the default of glibc) and
kept, medians of rounds that alternate, each in a process of its own; pages that fault per image; the ratio.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

CASES = [
    ("resnet8", "train", 32),
    ("resnet8", "train", 128),
    ("resnet8", "evaluate", 512),
    ("vgg16", "train", 128),
    ("vgg16", "evaluate", 512),
    ("resnet18", "train", 32),
    ("resnet18", "evaluate", 512),
]


def measure(model_name: str, what: str, batch: int, images: int, keep: bool) -> dict[str, float]:
    """Seconds of the processor and faults of one pass over random images, after another one."""
    import torch
    import torch.nn.functional as F

    from accordion_bench.models.resnet import CifarResNet, ResNet18
    from accordion_bench.models.vgg import VGG
    from accordion_bench.processes.machine import keep_freed_memory

    if keep:
        keep_freed_memory()
    torch.set_num_threads(1)
    make = {
        "resnet8": lambda: CifarResNet(3, 10, 8),
        "vgg16": lambda: VGG(3, 10, 16, width=16),
        "resnet18": lambda: ResNet18(3, 10),
    }
    model = make[model_name]().train(what == "train")
    x, y = torch.randn(images, 3, 32, 32), torch.randint(10, (images,))

    def once() -> None:
        with torch.set_grad_enabled(what == "train"):
            for some, labels in zip(x.split(batch), y.split(batch), strict=True):
                loss = F.cross_entropy(model(some), labels)
                if what == "train":
                    loss.backward()

    once()
    before, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    once()
    seconds = time.process_time() - before
    return {"seconds": seconds, "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("scripts.bench_memory", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=1024, help="of a pass (%(default)s); resnet18 takes a quarter")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # a measurement in a process of its own
    typed = parser.parse_args()
    if typed.one:
        model, what, batch, keep = typed.one
        print(json.dumps(measure(model, what, int(batch), typed.images, keep == "kept")))
        return
    print("| network | | batch | given back, images/s | kept, images/s | ratio | faults per image, given back | kept |")
    print("|---|---|---|---|---|---|---|---|")
    for model, what, batch in CASES:
        images = typed.images // 4 if model == "resnet18" and what == "train" else typed.images
        found: dict[str, list[dict[str, float]]] = {"given back": [], "kept": []}
        for _ in range(typed.rounds):
            for keep, rows in found.items():
                command = [sys.executable, "-m", "scripts.bench_memory", "--images", str(images), "--one"]
                command += [model, what, str(batch), keep]
                rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        seconds = {keep: statistics.median(row["seconds"] for row in rows) for keep, rows in found.items()}
        faults = {keep: statistics.median(row["faults"] for row in rows) / images for keep, rows in found.items()}
        print(
            f"| {model} | {what} | {batch} | {images / seconds['given back']:,.0f} | {images / seconds['kept']:,.0f} "
            f"| {seconds['given back'] / seconds['kept']:.2f} | {faults['given back']:,.0f} | {faults['kept']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Effect of keeping freed memory in the process: training and evaluation of images, one thread.

    python -m scripts.bench.memory [--rounds 5] [--images 1024]

Prints a Markdown table: images per second of processor time with freed memory given back (the default of glibc) and
kept, medians of alternating rounds, each in a separate process; page faults per image; the ratio.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from scripts.bench.harness import command_line, in_rounds, print_head, print_row

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
    """Return processor seconds and page faults of one pass over random images, after a warm-up pass."""
    import torch
    import torch.nn.functional as F

    from accordion_bench.models.cifar_networks import VGG
    from accordion_bench.models.resnet import CifarResNet, ResNet18
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
    """Run the command line."""
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--images", type=int, default=1024, help="of a pass (%(default)s); resnet18 takes a quarter")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # a measurement in a process of its own
    typed = parser.parse_args()
    if typed.one:
        model, what, batch, keep = typed.one
        print(json.dumps(measure(model, what, int(batch), typed.images, keep == "kept")))
        return
    kept = ("faults per image, given back", "kept")
    print_head("network", "", "batch", "given back, images/s", "kept, images/s", "ratio", *kept)
    for model, what, batch in CASES:
        images = typed.images // 4 if model == "resnet18" and what == "train" else typed.images
        command = [sys.executable, "-m", "scripts.bench.memory", "--images", str(images), "--one"]
        command += [model, what, str(batch)]

        def once(keep: str, command: list[str] = command) -> dict[str, float]:
            return json.loads(subprocess.run([*command, keep], capture_output=True, text=True, check=True).stdout)

        found = in_rounds(("given back", "kept"), typed.rounds, once)
        before, after = (statistics.median(row["seconds"] for row in rows) for rows in found.values())
        faults = [statistics.median(row["faults"] for row in rows) / images for rows in found.values()]
        speeds = [f"{images / seconds:,.0f}" for seconds in (before, after)]
        print_row(model, what, batch, *speeds, f"{before / after:.2f}", *(f"{count:,.0f}" for count in faults))


if __name__ == "__main__":
    main()

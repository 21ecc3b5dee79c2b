"""What a GPU must still show, in one command: correctness, then times. Writes one Markdown file and one JSON.

    python -m scripts.gpu.report                          # a machine with CUDA; results/gpu
    python -m scripts.gpu.report --only codecs memory     # some sections
    python -m scripts.gpu.report --compressors topk none  # of codecs, counts and exchanges some
    python -m scripts.gpu.report --smallest --out FOLDER  # anywhere: what needs no CUDA, as small as it goes

Sections: the tests marked gpu; torch's CUDA sanitizer around exchanges; waits of the host around them, forbidden where
sizes are fixed; launches and waits against the stated ones; codecs next to a copy; steps next to
DistributedDataParallel and its hooks, with a trace; four workers in one process next to a plain loop; peak memory.
Times by CUDA events, after a warm-up round, in interleaved rounds; medians. Without CUDA a section that needs it says
so in a line. `--device cpu` tries the sections that measure time on the CPU, over gloo. Ends with 1 where a check does
not hold.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.report.render.tables import folded
from accordion_bench.runs.folder import environment
from scripts.gpu.sections import SECTIONS, Section, Setting

SMALLEST = ["none", "powersgd", "topk"]
TITLES = {
    "tests": "Tests that need CUDA",
    "sanitizer": "CUDA sanitizer",
    "waits": "Waits of the host around an exchange",
    "counts": "Launches and waits, counted",
    "codecs": "Codecs next to a copy",
    "steps": "Steps next to DistributedDataParallel",
    "training": "Four workers in one process next to a plain loop",
    "memory": "Memory",
}


def header(setting: Setting) -> dict[str, Any]:
    """What a reader needs to repeat it."""
    about = environment()
    keys = ("command", "commit", "started", "processor", "cpu_cores", "gpus", "versions")
    return {
        **{key: about[key] for key in keys},
        "driver": driver(),
        "cuda": torch.version.cuda,
        "device": setting.device or "none; a pretended one is counted on",
        "seed": setting.seed,
        "n": f"{setting.rounds} rounds",
    }


def driver() -> str:
    """Version of the driver, and memory of the GPUs; "" = not known."""
    command = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(sorted(set(done.stdout.split("\n")) - {""})) if done.returncode == 0 else ""


def page(facts: dict[str, Any], made: dict[str, Section]) -> str:
    """The report."""
    lines = ["# What a GPU has shown", "", *(f"- {key}: {value}" for key, value in facts.items())]
    for name, section in made.items():
        lines += ["", f"## {TITLES[name]}{', FAILED' * section.failed}", "", *section.lines]
    return folded("\n".join(lines)) + "\n"


def main() -> int:
    """As the module says."""
    names = sorted(yaml_files("compressor"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--compressors", nargs="+", default=[], choices=names, metavar="NAME", help="default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    parser.add_argument("--smallest", action="store_true", help="few compressors, small networks, two rounds")
    parser.add_argument("--rounds", type=int, default=0, help="default: 15, at the smallest 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results") / "gpu")
    typed = parser.parse_args()
    if typed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs CUDA, and this machine has none; type --smallest")
    if typed.rounds == 1:
        parser.error("--rounds must be at least 2, quartiles need them, got 1; type --rounds 2")
    if typed.out == parser.get_default("out") and not torch.cuda.is_available():
        parser.error("results/gpu is for measurements on a GPU, and this machine has none; type --out FOLDER")
    device = typed.device or ("cuda" if torch.cuda.is_available() else "")
    typed.out.mkdir(parents=True, exist_ok=True)
    chosen = typed.compressors or (SMALLEST if typed.smallest else names)
    rounds = typed.rounds or (2 if typed.smallest else 15)
    setting = Setting(device, typed.smallest, rounds, typed.seed, typed.out, chosen)
    facts, made = header(setting), {}
    for name in typed.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        made[name] = run(name, setting)
        # what is known so far is on disk, whatever the next section does
        (typed.out / "README.md").write_text(page(facts, made), encoding="utf-8")
        told = {key: {"failed": one.failed, "found": one.facts} for key, one in made.items()}
        (typed.out / "report.json").write_text(json.dumps({"header": facts, **told}, indent=1), encoding="utf-8")
    print(typed.out / "README.md")
    return int(any(section.failed for section in made.values()))


def run(name: str, setting: Setting) -> Section:
    """One section; what it raises is its result, and no end of the others."""
    try:
        with torch.no_grad():
            return SECTIONS[name](setting)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return Section([said.splitlines()[0]], {"error": said}, failed=True)


if __name__ == "__main__":
    sys.exit(main())

"""Record of a run's environment, needed to repeat it: command, commit, versions, hardware."""

import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from typing import Any

from accordion_bench import __version__
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.runs.secrets import masked, masked_command

NETLAB = "ACCORDION_BENCH_NETLAB"  # JSON with which a netlab describes itself to the runs inside


PACKAGES = ("torch", "torchvision", "hydra-core", "numpy", "numba", "scikit-learn")


def environment(threads: int | None = None, sweep: str = "", kernels: str = "") -> dict[str, Any]:
    """Return the record of the environment: command, commit, versions, hardware, system load.

    Secrets in the command are masked, because run folders are shared.

    Args:
        threads: threads per process.
        sweep: sweep that the run belongs to; "" = none.
        kernels: implementation of the codecs, `numba` or `torch`; "" = no codec with kernels is used.
    """
    from accordion_bench.comm import on_device  # imports torch, which reports do without

    versions = {"accordion-bench": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "command": masked_command(shlex.join(sys.orig_argv if hasattr(sys, "orig_argv") else sys.argv)),
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **({"sweep": sweep} if sweep else {}),
        **({"kernels": kernels} if kernels else {}),
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "processor": on_device.processor_name(),
        "cpu_cores": os.cpu_count(),
        "threads": threads,
        "load": _load(),
        "host": platform.node(),
        "gpus": on_device.gpu_models(),
        **({"netlab": masked(json.loads(lab))} if (lab := os.environ.get(NETLAB)) else {}),
    }


@functools.cache
def _commit() -> str:
    """Return the checkout's commit, with `+changes` if tracked files differ from it; "" outside a checkout.

    It is read once per process: later changes do not affect modules that are already imported.
    """
    here = package_dir()
    try:
        run = lambda *args: subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, timeout=10)  # noqa: E731
        head = run("rev-parse", "HEAD")
        if head.returncode or run("ls-files", "--error-unmatch", __file__).returncode:
            return ""  # no checkout, or another project's
        changed = run("status", "--porcelain", "--untracked-files=no", "--", str(here), str(here.parent / "conf"))
        return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _load() -> float | None:
    """Return the mean number of runnable processes in the last minute; None if the system does not provide it."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None

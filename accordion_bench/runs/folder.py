"""The run folder: reading and writing config, environment, metrics, summary and done marker; record of the environment.

config.yaml  environment.json  metrics.jsonl  summary.json  weights.pt  labels.json  run.log  run.lock
checkpoint/  done

The folder stays readable if the run crashes.
"""

import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import platform
import secrets
import shlex
import stat
import subprocess
import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from accordion_bench import __version__
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.options.override import translate_renamed_config
from accordion_bench.options.units import counted
from accordion_bench.runs import durable, untrusted
from accordion_bench.runs.metrics import is_number, wrong_in_rows, wrong_in_summary
from accordion_bench.runs.untrusted import masked, masked_command

log = logging.getLogger("accordion_bench")

NETLAB = "ACCORDION_BENCH_NETLAB"  # JSON with which a netlab describes itself to the runs inside
PACKAGES = ("torch", "torchvision", "hydra-core", "numpy", "numba", "scikit-learn")
METRICS = "metrics.jsonl"
_FILE, _FOLDER, _LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK
KINDS = {_FILE: "a file", _FOLDER: "a folder", _LINK: "a link", stat.S_IFIFO: "a pipe"}
# files that a run replaces whole; and files and folders that it appends to, with the accepted file types
REPLACED = (
    *("config.yaml", "environment.json", METRICS, "summary.json", "done", "weights.pt", "best.pt"),
    *("weights.safetensors", "best.safetensors"),
    *("trace.json", "profile.txt", "timeline.json", "labels.json"),
)
APPENDED = {
    **dict.fromkeys(("run.log", "run.lock", "run.owner", "metrics.csv"), (_FILE,)),
    **dict.fromkeys(("checkpoint", "tensorboard", "wandb"), (_FOLDER,)),
}


class _Log(logging.FileHandler):
    """Handler of run.log that ignores write errors: the run's own writes report them, once."""

    def _open(self) -> TextIOWrapper:
        return open(durable.to_append(self.baseFilename), "a", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # unwritten data of a full disk
            super().close()


def damaged(file: Path, why: str) -> str:
    """Return the error message for a file of a run that was changed by something else."""
    return (
        f"{file} must be as the run has written it, got {why}; restore it, or type the run's own options for a new run"
    )


class RunFolder:
    """Folder of one run. Files are written whole or appended by lines, so a reader never sees a partial one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        root: str,
        label: str,
        config: dict[str, Any],
        threads: int | None = None,
        sweep: str = "",
        kernels: str = "",
    ) -> "RunFolder":
        """Create a folder with the configuration under `root`; its name is unique even among runs of the same second.

        Args:
            root: `paths.runs`.
            label: part of the name.
            config: configuration of the run.
            threads: threads per process.
            sweep: sweep that the run belongs to; "" = none.
            kernels: implementation of the codecs, see `environment`.
        """
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{label}-{secrets.token_hex(3)}"
        folder = cls(Path(root) / name)
        with durable.room(folder.path):
            folder.path.mkdir(parents=True)
        folder.write_config(config)
        folder.write_json("environment.json", environment(threads, sweep, kernels))
        durable.sync(folder.path.parent)
        return folder

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.yaml."""
        import yaml

        self._write("config.yaml", durable.yaml_text(yaml.safe_dump(config, sort_keys=False)))

    def read_config(self) -> dict[str, Any]:
        """Read config.yaml; renamed options have their current names.

        Raises:
            ConfigError: the file is damaged.
        """
        return translate_renamed_config(self._saved_config())

    def _saved_config(self) -> dict[str, Any]:
        import yaml

        file = self.path / "config.yaml"
        try:
            saved = untrusted.read_yaml(file)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(damaged(file, str(error).splitlines()[0])) from None
        if not isinstance(saved, dict):
            raise ConfigError(damaged(file, "no options"))
        return saved

    def refuse_strange(self) -> None:
        """Refuse unexpected file types where a resumed run would write, append or remove.

        A file that the run replaces whole may be a link, which is removed and never followed.

        Raises:
            ConfigError: for instance a pipe, a folder in the place of a file, or a link that would be followed.
        """
        whole = [part for name in REPLACED for part in (name, f"{name}.part")]
        for name, may_be in {**dict.fromkeys(whole, (_FILE, _LINK)), **APPENDED}.items():
            with contextlib.suppress(FileNotFoundError):
                kind = stat.S_IFMT((self.path / name).lstat().st_mode)
                if kind not in may_be:
                    raise ConfigError(damaged(self.path / name, KINDS.get(kind, "an unknown file type")))

    def reopen(self, epochs: int) -> None:
        """Change the number of epochs of a run; a finished run becomes unfinished."""
        saved = self._saved_config()
        self.remove_summary()
        self.write_config({**saved, "epochs": epochs})

    def update_description(self, said: dict[str, Any]) -> None:
        """Change `label`, `tags` or `note` of `RunConfig`; everything else is unchanged, including a finished state."""
        saved = self._saved_config()
        if {key: saved.get(key) for key in said} != said:
            self.write_config({**saved, **said})

    def remove_summary(self) -> None:
        """Remove the done marker and the summary, because the run continues."""
        with durable.room(self.path):
            (self.path / "done").unlink(missing_ok=True)
            (self.path / "summary.json").unlink(missing_ok=True)

    def note_resumption(self, threads: int | None, kernels: str) -> None:
        """Append to environment.json what changed since the run started; a damaged file is left unchanged.

        The arguments are those of `environment`.
        """
        with contextlib.suppress(ConfigError):
            first = self.read_json("environment.json")
            before = first.get("resumed")
            changes = {key: new for key, new in environment(threads, "", kernels).items() if first.get(key) != new}
            first["resumed"] = [*(before if isinstance(before, list) else []), changes]
            self.write_json("environment.json", first)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON file."""
        self._write(name, durable.json_text(content, indent=1) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one JSON file.

        Raises:
            ConfigError: the file is damaged.
        """
        file = self.path / name
        try:
            content = untrusted.read_json(file)
        except (OSError, ValueError) as error:
            raise ConfigError(damaged(file, str(error).splitlines()[0])) from None
        if not isinstance(content, dict):
            raise ConfigError(damaged(file, "no JSON object"))
        return content

    def _write(self, name: str, text: str) -> None:
        with durable.room(self.path):
            durable.write_text(self.path / name, text)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row to metrics.jsonl."""
        with durable.room(self.path):
            durable.append_line(self.path / METRICS, durable.json_text(row))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all intact rows of metrics.jsonl; rows truncated by a crash are omitted."""
        rows = []
        with contextlib.suppress(OSError, untrusted.Refused):
            for line in untrusted.split_lines(self.path / METRICS, most=None):
                with contextlib.suppress(ValueError):
                    row = untrusted.parse_json(line)
                    if isinstance(row, dict) and isinstance(row.get("epoch"), int):
                        rows.append(row)
        return rows

    def keep_metrics_before(self, epoch: int) -> str:
        """Drop the rows from `epoch` on, which a resumed run writes again; return what is wrong with the others, or "".

        If something is wrong, the original file is kept as metrics.jsonl.damaged.
        """
        rows, before = [row for row in self.read_metrics() if row["epoch"] < epoch], ""
        with contextlib.suppress(OSError, untrusted.Refused):
            before = "\n".join(untrusted.split_lines(self.path / METRICS, most=None))
        self._write(METRICS, "".join(durable.json_text(row) + "\n" for row in rows))
        wrong = self.wrong_rows(epoch)
        if wrong and before:
            self._write(f"{METRICS}.damaged", before)
            wrong += f"; the original file is {METRICS}.damaged"
        return wrong

    def changed_meanwhile(self, epochs: int) -> list[str]:
        """Return changes that others made to the files of a run that has written `epochs` epochs, as sentences."""
        found = []
        for read in (self.read_config, lambda: self.read_json("environment.json")):
            try:
                read()
            except ConfigError as damage:
                found.append(str(damage))
        return [*found, *filter(None, [self.wrong_rows(epochs)])]

    def wrong_rows(self, epochs: int) -> str:
        """Return what is wrong with the rows of the first `epochs` epochs, as a sentence; "" if nothing is."""
        rows = self.read_metrics()
        if lacking := epochs - len({row["epoch"] for row in rows}):
            return f"metrics.jsonl lacks the rows of {counted(lacking, 'epoch')}: reports will call the run incomplete"
        wrong = wrong_in_rows(rows)
        return f"metrics.jsonl has {wrong}: reports will leave the run out" if wrong else ""

    @property
    def done(self) -> bool:
        """Whether the run is complete and its summary is readable and consistent."""
        return self.marked and not self.wrong_summary()

    @property
    def marked(self) -> bool:
        """Whether the done marker exists."""
        return (self.path / "done").exists()

    def wrong_summary(self) -> str:
        """Return what is wrong with summary.json, as a sentence; "" if nothing is."""
        try:
            summary = untrusted.read_json(self.path / "summary.json")
        except (OSError, ValueError) as error:
            return f"summary.json cannot be read ({str(error).splitlines()[0]})"
        if not isinstance(summary, dict) or not is_number(summary.get("metric")):
            return "summary.json has no metric"
        return wrong_in_summary(summary, self.read_metrics()[-1:])

    @property
    def sweep(self) -> str:
        """Name of the sweep that the run belongs to; "" if there is none or it cannot be read."""
        try:
            return str(self.read_json("environment.json").get("sweep", ""))
        except ConfigError:
            return ""

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json and the done marker."""
        self.write_json("summary.json", summary)
        self._write("done", "")

    def log_to_file(self) -> logging.Handler:
        """Add a handler that writes the package's log to run.log, and return it."""
        handler = _Log(self.path / "run.log", encoding="utf-8")
        formatter = logging.Formatter("%(asctime)s UTC %(levelname)s %(message)s")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        return handler


# ---- environment.json


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

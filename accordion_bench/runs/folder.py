"""The run folder: config, environment, metrics, summary, done marker. Readable whatever happens to the run.

config.yaml  environment.json  metrics.jsonl  summary.json  weights.pt  labels.json  run.log  run.lock
checkpoint/  done
"""

import contextlib
import logging
import secrets
import stat
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError
from accordion_bench.options.override import config_in_todays_words
from accordion_bench.options.units import counted
from accordion_bench.runs import durable, untrusted
from accordion_bench.runs.environment import environment
from accordion_bench.runs.metrics import is_number, wrong_in_rows, wrong_in_summary

log = logging.getLogger("accordion_bench")

METRICS = "metrics.jsonl"
_FILE, _FOLDER, _LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK
KINDS = {_FILE: "a file", _FOLDER: "a folder", _LINK: "a link", stat.S_IFIFO: "a pipe"}
# what a run replaces as a whole, and what it adds to, with what may have its name
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
    """run.log: where it cannot be written, the run that cannot be written either says so, once."""

    def _open(self) -> TextIOWrapper:
        return open(durable.to_append(self.baseFilename), "a", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk has not taken
            super().close()


def damaged(file: Path, why: str) -> str:
    """The sentence for a file of a run that something else than the run has written."""
    return (
        f"{file} must be as the run has written it, got {why}; restore it, or type the run's own options for a new run"
    )


class RunFolder:
    """One run's folder. Files are written whole or appended by lines, so that a reader never sees a torn one.

    Args:
        path: of the folder.
    """

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
        """A new folder under `root`, unique even among runs of the same second, with the configuration in it.

        Args:
            root: `paths.runs`.
            label: in its name.
            config: of the run.
            threads: of each process.
            sweep: that the run belongs to; "" = none.
            kernels: with what its codecs compute, see `environment`.
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
        """Read config.yaml; renamed options have their names of today.

        Raises:
            ConfigError: it is damaged.
        """
        return config_in_todays_words(self._saved_config())

    def _saved_config(self) -> dict[str, Any]:
        import yaml

        file = self.path / "config.yaml"
        try:
            saved = untrusted.read_yaml(file)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(damaged(file, str(error).splitlines()[0])) from None
        if not isinstance(saved, dict):
            raise ConfigError(damaged(file, "no options in it"))
        return saved

    def refuse_strange(self) -> None:
        """Refuse what is no file, or no folder, where a run that goes on would write, append or remove.

        Of what it replaces as a whole a link may have the name: it is removed, and never followed.

        Raises:
            ConfigError: there is a pipe, say, a folder in the place of a file, or a link that would be followed.
        """
        whole = [part for name in REPLACED for part in (name, f"{name}.part")]
        for name, may_be in {**dict.fromkeys(whole, (_FILE, _LINK)), **APPENDED}.items():
            with contextlib.suppress(FileNotFoundError):
                kind = stat.S_IFMT((self.path / name).lstat().st_mode)
                if kind not in may_be:
                    raise ConfigError(damaged(self.path / name, KINDS.get(kind, "something else than a file")))

    def reopen(self, epochs: int) -> None:
        """Let a run have another number of epochs; a finished one is unfinished then."""
        saved = self._saved_config()
        self.remove_summary()
        self.write_config({**saved, "epochs": epochs})

    def retell(self, said: dict[str, Any]) -> None:
        """Let a run say other words of itself; all else stays, the end of a finished run, too.

        Args:
            said: `label`, `tags` or `note` of `RunConfig`, as they are to be.
        """
        saved = self._saved_config()
        if {key: saved.get(key) for key in said} != said:
            self.write_config({**saved, **said})

    def remove_summary(self) -> None:
        """Remove what says how the run has ended: it goes on."""
        with durable.room(self.path):
            (self.path / "done").unlink(missing_ok=True)
            (self.path / "summary.json").unlink(missing_ok=True)

    def note_resumption(self, threads: int | None, kernels: str) -> None:
        """Note in environment.json what is other than it was when the run began; of a damaged one nothing.

        Args:
            threads: of each process.
            kernels: with what its codecs compute, see `environment`.
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
            ConfigError: it is damaged.
        """
        file = self.path / name
        try:
            content = untrusted.read_json(file)
        except (OSError, ValueError) as error:
            raise ConfigError(damaged(file, str(error).splitlines()[0])) from None
        if not isinstance(content, dict):
            raise ConfigError(damaged(file, "no names in it"))
        return content

    def _write(self, name: str, text: str) -> None:
        with durable.room(self.path):
            durable.write_text(self.path / name, text)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row to metrics.jsonl."""
        with durable.room(self.path):
            durable.append_line(self.path / METRICS, durable.json_text(row))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl that are as they were written; those that a crash has cut off are none."""
        rows = []
        with contextlib.suppress(OSError, untrusted.Refused):
            for line in untrusted.split_lines(self.path / METRICS, most=None):
                with contextlib.suppress(ValueError):
                    row = untrusted.parse_json(line)
                    if isinstance(row, dict) and isinstance(row.get("epoch"), int):
                        rows.append(row)
        return rows

    def keep_metrics_before(self, epoch: int) -> str:
        """Drop the rows from `epoch` on, which a resumed run writes again; what is wrong with those before.

        Where something is, the file stays beside the new one as it was.
        """
        rows, before = [row for row in self.read_metrics() if row["epoch"] < epoch], ""
        with contextlib.suppress(OSError, untrusted.Refused):
            before = "\n".join(untrusted.split_lines(self.path / METRICS, most=None))
        self._write(METRICS, "".join(durable.json_text(row) + "\n" for row in rows))
        wrong = self.wrong_rows(epoch)
        if wrong and before:
            self._write(f"{METRICS}.damaged", before)
            wrong += f"; what was there is in {METRICS}.damaged"
        return wrong

    def changed_meanwhile(self, epochs: int) -> list[str]:
        """What others have done to the files of a run that has written so many epochs, as sentences."""
        found = []
        for read in (self.read_config, lambda: self.read_json("environment.json")):
            try:
                read()
            except ConfigError as damage:
                found.append(str(damage))
        return [*found, *filter(None, [self.wrong_rows(epochs)])]

    def wrong_rows(self, epochs: int) -> str:
        """What is wrong with the rows of so many epochs, as a sentence; "" where nothing is."""
        rows = self.read_metrics()
        if lacking := epochs - len({row["epoch"] for row in rows}):
            return f"metrics.jsonl lacks the rows of {counted(lacking, 'epoch')}: reports will call the run incomplete"
        wrong = wrong_in_rows(rows)
        return f"metrics.jsonl has {wrong}: reports will leave the run out" if wrong else ""

    @property
    def done(self) -> bool:
        """Whether the run came to its end, and its summary can be read and be true."""
        return self.marked and not self.wrong_summary()

    @property
    def marked(self) -> bool:
        """Whether the run has left its done marker."""
        return (self.path / "done").exists()

    def wrong_summary(self) -> str:
        """What is wrong with summary.json, as a sentence; "" where nothing is."""
        try:
            summary = untrusted.read_json(self.path / "summary.json")
        except (OSError, ValueError) as error:
            return f"summary.json cannot be read ({str(error).splitlines()[0]})"
        if not isinstance(summary, dict) or not is_number(summary.get("metric")):
            return "summary.json has no metric in it"
        return wrong_in_summary(summary, self.read_metrics()[-1:])

    @property
    def sweep(self) -> str:
        """The sweep that the run belongs to; "" where there is none, or where that cannot be read."""
        try:
            return str(self.read_json("environment.json").get("sweep", ""))
        except ConfigError:
            return ""

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json and the done marker."""
        self.write_json("summary.json", summary)
        self._write("done", "")

    def log_to_file(self) -> logging.Handler:
        """Send the package's log to run.log, too."""
        handler = _Log(self.path / "run.log", encoding="utf-8")
        formatter = logging.Formatter("%(asctime)s UTC %(levelname)s %(message)s")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        return handler

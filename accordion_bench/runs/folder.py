"""The run folder: config, environment, metrics, summary, done marker. Readable whatever happens to the run.

config.yaml  environment.json  metrics.jsonl  summary.json  run.log  run.lock  checkpoint/  done
"""

import contextlib
import json
import logging
import os
import secrets
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import durable, untrusted
from accordion_bench.runs.environment import environment
from accordion_bench.runs.old_folders import in_todays_words

log = logging.getLogger("accordion_bench")


class _Log(logging.FileHandler):
    """run.log: where it cannot be written, the run that cannot be written either says so, once."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        return open(os.open(self.baseFilename, flags, 0o666), "a", encoding=self.encoding)

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

        self._write("config.yaml", yaml.safe_dump(config, sort_keys=False))

    def read_config(self) -> dict[str, Any]:
        """Read config.yaml, in today's words where an earlier version has written it.

        Raises:
            ConfigError: it is damaged.
        """
        return in_todays_words(self._saved_config())

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

    def refuse_links(self) -> None:
        """Refuse links where a run that goes on would write, or remove, what is elsewhere.

        Raises:
            ConfigError: there is one.
        """
        for file in (self.path / "run.log", self.path / "checkpoint"):
            if file.is_symlink():
                raise ConfigError(damaged(file, "a link"))

    def reopen(self, epochs: int) -> None:
        """Let a run have another number of epochs; a finished one is unfinished then."""
        saved = self._saved_config()
        (self.path / "done").unlink(missing_ok=True)
        (self.path / "summary.json").unlink(missing_ok=True)
        self.write_config({**saved, "epochs": epochs})

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
        self._write(name, json.dumps(content, indent=1) + "\n")

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
        with durable.room(self.path), open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole rows of metrics.jsonl up to the first that a crash has cut off, or damaged."""
        rows = []
        with contextlib.suppress(OSError, untrusted.Refused):
            for _, row in untrusted.read_lines(self.path / "metrics.jsonl", most=None):
                if not isinstance(row, dict) or not isinstance(row.get("epoch"), int):
                    break
                rows.append(row)
        return rows

    def keep_metrics_before(self, epoch: int) -> int:
        """Drop the rows from `epoch` on, which a resumed run writes again; how many of those before are lacking."""
        rows = [row for row in self.read_metrics() if row["epoch"] < epoch]
        self._write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return epoch - len({row["epoch"] for row in rows})

    @property
    def done(self) -> bool:
        """Whether the run came to its end, and its summary can be read."""
        if not (self.path / "done").exists():
            return False
        try:
            return bool(self.read_json("summary.json"))
        except ConfigError:
            return False

    @property
    def sweep(self) -> str:
        """The sweep that the run belongs to; "" where there is none, or where that cannot be read."""
        return self._of_environment("sweep")

    @property
    def kernels(self) -> str:
        """With what the codecs have computed at first; "" where that is not known."""
        return self._of_environment("kernels")

    def _of_environment(self, key: str) -> str:
        try:
            return str(self.read_json("environment.json").get(key, ""))
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

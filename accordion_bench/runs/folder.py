"""The run folder: config, environment, metrics, summary, done marker. Readable whatever happens to the run.

config.yaml  environment.json  metrics.jsonl  summary.json  run.log  run.lock  checkpoint/  done
"""

import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

from accordion_bench.runs.environment import environment
from accordion_bench.runs.old_folders import in_todays_words

log = logging.getLogger("accordion_bench")


class RunFolder:
    """One run's folder. Files are written whole or appended by lines, so that a reader never sees a torn one.

    Args:
        path: of the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, root: str, label: str, config: dict[str, Any], threads: int | None = None) -> "RunFolder":
        """A new folder under `root`, unique even among runs of the same second, with the configuration in it."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}-{secrets.token_hex(3)}"
        folder = cls(Path(root) / name)
        folder.path.mkdir(parents=True)
        folder.write_config(config)
        folder.write_json("environment.json", environment(threads))
        return folder

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.yaml."""
        import yaml

        self._write("config.yaml", yaml.safe_dump(config, sort_keys=False))

    def read_config(self) -> dict[str, Any]:
        """Read config.yaml, in today's words where an earlier version has written it."""
        import yaml

        return in_todays_words(yaml.safe_load((self.path / "config.yaml").read_text()))

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON file."""
        self._write(name, json.dumps(content, indent=1) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one JSON file."""
        return json.loads((self.path / name).read_text())

    def _write(self, name: str, text: str) -> None:
        part = self.path / f"{name}.part"
        part.write_text(text)
        os.replace(part, self.path / name)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row to metrics.jsonl."""
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole rows of metrics.jsonl; a row that a crash has cut off is left out."""
        file = self.path / "metrics.jsonl"
        rows = []
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def keep_metrics_before(self, epoch: int) -> None:
        """Drop the rows from `epoch` on; a resumed run writes them again."""
        rows = [row for row in self.read_metrics() if row["epoch"] < epoch]
        self._write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    @property
    def done(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "done").exists()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json and the done marker."""
        self.write_json("summary.json", summary)
        self._write("done", "")

    def log_to_file(self) -> logging.Handler:
        """Send the package's log to run.log, too."""
        handler = logging.FileHandler(self.path / "run.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        return handler

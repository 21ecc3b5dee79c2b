"""MLflow tracker."""

import atexit
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.runs.untrusted import masked
from accordion_bench.trackers.tracker import BY_STEP, FIGURES, Tracker, scalars, send_figures, tags_of

MOST = 100  # parameters, or metrics, per request
LONGEST = 500  # characters of a parameter's value that every version accepts


@with_options
class MLflow(Tracker):
    """Tracker that logs options, every row, the loss of each step, figures and the summary to MLflow.

    A resumed run continues under its old id; rows that it repeats are logged twice.
    """

    uri: str | None = option(
        "URI of a tracking server or database; null = MLFLOW_TRACKING_URI, or MLflow's own default", default=None
    )
    experiment: str = option("name of the MLflow experiment", default="accordion_bench")
    figures: bool = option(FIGURES, default=True)

    by_step = True
    chosen_as = {"mlflow": Choice("MLflow: options, rows, losses of each step, figures and summary")}

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, usual in (("uri", None), ("experiment", "accordion_bench")):
            given = getattr(self, key)
            if given != usual and not (isinstance(given, str) and given.strip()):
                raise ValueRefused(key, f"text{' or {null}' if usual is None else ''}", given or repr(given), usual)
        if importlib.util.find_spec("mlflow") is None:
            raise ConfigError(
                "tracker=mlflow must find the package mlflow, got none; type pip install 'accordion-bench[mlflow]', or "
                "tracker=none"
            )

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient  # seconds to import

        from accordion_bench.report.read import flat

        self.folder = folder
        options = {key: str(value)[:LONGEST] for key, value in flat(masked(cfg)).items() if value is not None}
        tags = {**dict.fromkeys(tags_of(cfg), "true"), "mlflow.note.content": cfg.get("note") or ""}
        try:
            self.client = MlflowClient(self.uri)
            found = self.client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else self.client.create_experiment(self.experiment)
            earlier = self.client.search_runs([experiment], f"attributes.run_name = '{folder.name}'")
            if earlier:
                self.run = earlier[0].info.run_id
                self.client.update_run(self.run, status="RUNNING")
            else:
                self.run = self.client.create_run(experiment, tags=tags, run_name=folder.name).info.run_id
                params = [Param(key, value) for key, value in options.items()]
                for first in range(0, len(params), MOST):
                    self.client.log_batch(self.run, params=params[first : first + MOST])
        except (MlflowException, OSError) as error:
            why = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"tracker.uri={self.uri or 'null'} must be a place that MLflow reaches, got: {why}; type "
                "tracker.uri=sqlite:///mlflow.db, or tracker=csv"
            ) from error
        self.status = "FAILED"
        atexit.register(self._end)

    def log_losses(self, step: int, losses: Sequence[float]) -> None:
        self._log([(BY_STEP, loss, i) for i, loss in enumerate(losses, step - len(losses) + 1)])

    def log(self, row: dict[str, Any]) -> None:
        self._log([(key, value, row["step"]) for key, value in scalars(row).items()])

    def finish(self, summary: dict[str, Any]) -> None:
        if self.figures:
            send_figures(self.folder, summary, self._send, "MLflow")
        self._log([(f"summary/{key}", value, summary["steps"]) for key, value in scalars(summary).items()])
        self.status = "FINISHED"
        self._end()

    def _send(self, drawn: Sequence[Path]) -> None:
        for png in drawn:
            self.client.log_artifact(self.run, str(png), "figures")

    def _end(self) -> None:
        """Set the run's final status in MLflow: finished, or failed if training did not complete."""
        atexit.unregister(self._end)
        self.client.set_terminated(self.run, self.status)

    def _log(self, values: Sequence[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        for first in range(0, len(values), MOST):
            metrics = [Metric(key, value, now, step) for key, value, step in values[first : first + MOST]]
            self.client.log_batch(self.run, metrics=metrics)

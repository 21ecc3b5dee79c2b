"""TensorBoard, Weights & Biases, and MLflow trackers."""

import atexit
import importlib.util
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accordion_bench.network.links import link_name
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import trust
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.presets import named
from accordion_bench.runs.metrics import METRICS, OF_TEXTS
from accordion_bench.runs.untrusted import masked
from accordion_bench.trackers.tracker import BY_STEP, FIGURES, Tracker, scalars, send_figures, tags_of

# column of metrics.jsonl -> group; other columns are grouped by their suffix, nested ones by their key
TRAIN = ("epoch", "lr", "train_loss", "loss_scale", "compression_error")
OF_ENDS = {
    "_seconds": "time",
    "_seconds_count": "time",
    "seconds": "time",
    "_bytes": "comm",
    "rounds": "comm",
    "_floats": "comm",
}
HPARAMS = ("metric", "best_metric", "wire_bytes", "payload_bytes", "seconds", "modelled_seconds")  # of summary.json


@with_options
class TensorBoard(Tracker):
    """Tracker that writes rows, the loss of each step, options and figures to the run folder's `tensorboard/`.

    Tags are grouped in `train/`, `eval/`, `comm/` and `time/`; nested values keep their key: `plan/`, `norms/`.
    """

    figures: bool = option(FIGURES, default=True)

    by_step = True
    chosen_as = {"tensorboard": Choice("rows, losses of each step and figures, in the run folder's tensorboard/")}

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tracker=tensorboard needs the package tensorboard; type pip install tensorboard")

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        self.cfg, self.folder = masked(cfg), folder
        self.writer: Any = None

    def log_losses(self, step: int, losses: Sequence[float]) -> None:
        first = step - len(losses) + 1
        writer = self._writer(first)
        for i, loss in enumerate(losses, first):
            writer.add_scalar("train/loss_by_step", loss, i)

    def log(self, row: dict[str, Any]) -> None:
        writer = self._writer(row["step"])
        for name, value in scalars(row).items():
            if name != "step":
                writer.add_scalar(grouped(name), value, row["step"])
        writer.flush()

    def finish(self, summary: dict[str, Any]) -> None:
        from accordion_bench.report.read import flat

        known = scalars(summary)
        ends = {f"hparam/{name}": known[name] for name in HPARAMS if math.isfinite(known.get(name, math.nan))}
        options = {key: value for key, value in flat(self.cfg).items() if isinstance(value, bool | int | float | str)}
        writer = self._writer(summary["steps"] + 1)
        writer.add_hparams(options, ends, run_name=".")
        if self.figures:
            send_figures(self.folder, summary, self._send, "TensorBoard")
        writer.close()

    def _writer(self, step: int) -> Any:
        """Return the writer; create it before the first write, which is for this step.

        A resumed run repeats only the steps from there on. TensorBoard purges these, and keeps those before.
        """
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step)
            for name, told in (("tags", ", ".join(self.cfg.get("tags") or [])), ("note", self.cfg.get("note"))):
                if told:
                    self.writer.add_text(name, told)
        return self.writer

    def _send(self, drawn: Sequence[Path]) -> None:
        import numpy as np
        from PIL import Image

        for png in drawn:
            pixels = np.asarray(Image.open(png).convert("RGB"))
            self.writer.add_image(f"figures/{png.stem}", pixels, dataformats="HWC")


def grouped(name: str) -> str:
    """Return the tag of a column: `time/compute_seconds`, `comm/wire_bytes`, `eval/accuracy`."""
    if "/" in name:
        return name
    ends = (group for end, group in OF_ENDS.items() if name.endswith(end))
    return f"{'train' if name in TRAIN else next(ends, 'eval')}/{name}"


# possible x axes, instead of wandb's own step; the first one is the default
AXES = ("payload_bytes", "wire_bytes", "seconds", "modelled_seconds", "epoch")
VALIDATION = ("validation_accuracy", "validation_loss")
OF_SPLITS = (*(f"{split}_{of.name}" for of in OF_TEXTS for split in ("test", "valid")), "perplexity_per_byte")
CURVES = (*METRICS, *OF_SPLITS, "test_loss", "train_loss", *VALIDATION)
TAG = 64  # characters; wandb accepts no longer tags
_running: Any = None  # run of this process, until it ends


def _give_up() -> None:
    """End the open run as failed: it did not complete, and the next one starts or the process ends."""
    global _running
    if _running is not None:
        _running.finish(exit_code=1)
    _running = None


def refuse_environment(environ: Mapping[str, str]) -> None:
    """Refuse a `WANDB_` environment variable with a value that wandb rejects.

    wandb itself would report it only after everything else has started.

    Raises:
        ConfigError: names the first such variable.
    """
    told = {name: value for name, value in environ.items() if name.startswith("WANDB_") and value}
    if not told:
        return
    import wandb

    if not hasattr(wandb.Settings, "update_from_env_vars"):  # before 0.19
        return
    for name, value in told.items():
        try:
            wandb.Settings().update_from_env_vars({name: value})
        except (wandb.Error, ValueError) as error:
            found: list[Any] = getattr(error, "errors", list)()  # pydantic's
            why = found[0]["msg"] if found else str(error)
            shown = masked(value, name)[:100]
            instead = "tracker.project=NAME" if name == "WANDB_PROJECT" else f"export {name}=VALUE"
            raise ConfigError(
                f"{name} in the environment must be what wandb takes, got {shown} ({' '.join(why.split())}); type "
                f"unset {name}, and {instead} for another one"
            ) from None


@with_options
class Wandb(Tracker):
    """Tracker that logs the configuration, every row, the run's figures and its summary to wandb.

    Metrics and losses are plotted against payload bytes; wire bytes, seconds, modelled seconds and epochs are available
    as x axes. A resumed run continues under its old id.
    """

    mode: Any = option(
        "offline needs neither account nor network (wandb sync uploads it later); online uploads",
        default="offline",
        choices=("offline", "online"),
    )
    project: str = option("name of the wandb project", default="accordion_bench")
    figures: bool = option(FIGURES, default=True)

    by_step = True
    chosen_as = {"wandb": Choice("Weights & Biases: configuration, rows, figures and summary")}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.project, str) or not re.fullmatch(r"[^/\\#?%:]{1,128}", self.project):
            raise ValueRefused("project", r"1 to 128 characters without / \ # ? % :", self.project, "accordion_bench")
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "tracker=wandb must find the package wandb, got none; type pip install 'accordion-bench[wandb]', "
                "or tracker=none"
            )
        refuse_environment(os.environ)

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        global _running
        import wandb  # a second to import

        from accordion_bench.methods.labels import label

        _give_up()
        trust(cfg)  # this process created the run from these options
        self.folder, choices = folder, {**cfg["choices"], "network": link_name(cfg)}
        try:
            self.run = wandb.init(
                project=self.project,
                mode=self.mode,
                dir=str(folder),
                id=folder.name[-128:],
                name=folder.name,
                resume="allow",
                group=choices.get("experiment") or f"{named(cfg, 'model')} on {named(cfg, 'dataset')}",
                job_type=cfg.get("label") or label(cfg),
                tags=sorted({tag[:TAG] for tag in tags_of({**cfg, "choices": choices})}),
                notes=cfg.get("note"),
                config=masked(cfg),
                settings=wandb.Settings(silent=True, console="off"),  # console output is in run.log
                reinit="create_new",
            )
        except wandb.Error as error:
            reach, instead = "write into the run folder", "tracker=tensorboard, or tracker=none"
            if self.mode == "online":
                reach, instead = "reach wandb", "wandb login, or tracker.mode=offline"
            why = " ".join(str(error).split())
            raise ConfigError(f"tracker.mode={self.mode} must {reach}, got: {why}; type {instead}") from error
        for axis in AXES:
            self.run.define_metric(axis)
        self.run.define_metric(BY_STEP, step_metric="step")
        for curve in CURVES:
            self.run.define_metric(curve, step_metric=AXES[0])
        _running = self.run
        atexit.unregister(_give_up)
        atexit.register(_give_up)  # runs before wandb's own handler, which would report success

    def log_losses(self, step: int, losses: Sequence[float]) -> None:
        for i, loss in enumerate(losses, step - len(losses) + 1):
            self.run.log({BY_STEP: loss, "step": i}, step=i, commit=i < step)  # the last one is committed with the row

    def log(self, row: dict[str, Any]) -> None:
        self.run.log(scalars(row), step=row["step"], commit=True)  # so a killed run loses no row

    def finish(self, summary: dict[str, Any]) -> None:
        global _running
        if self.figures:
            send_figures(self.folder, summary, self._send, "wandb")
        self.run.summary.update(scalars(summary))
        self.run.finish()
        _running = None

    def _send(self, drawn: Sequence[Path]) -> None:
        import wandb

        self.run.log({f"figures/{png.stem}": wandb.Image(str(png)) for png in drawn})


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

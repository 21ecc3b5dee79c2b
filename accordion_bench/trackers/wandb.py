"""Weights & Biases tracker."""

import atexit
import importlib.util
import os
import re
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

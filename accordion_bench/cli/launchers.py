"""One-sentence errors for Hydra's launchers and sweepers that are not installed or cannot start on this machine."""

import re
import shutil
import traceback
from collections.abc import Mapping
from typing import Any

from accordion_bench.options.checks import ConfigError, closest

# extra of this package that installs each plugin, by group
EXTRAS = {
    "hydra/launcher": {"joblib": "sweeps", "submitit_local": "sweeps", "submitit_slurm": "sweeps"},
    "hydra/sweeper": {"optuna": "optuna"},
}
OF_SLURM = ("srun", "sbatch")
HERE = "hydra/launcher=joblib to run the cells on this machine"
PLUGIN = re.compile(r"[/\\]hydra_plugins[/\\](?:hydra_)?(\w+?)_(launcher|sweeper)[/\\]")


def refuse(launcher: Mapping[str, Any]) -> None:
    """Refuse Slurm's launcher (Hydra's node) on a machine without Slurm's commands, before any cell runs."""
    if not str(launcher.get("_target_")).endswith(".SlurmLauncher"):
        return
    missing = [command for command in OF_SLURM if shutil.which(command) is None]
    if missing:
        raise ConfigError(
            f"hydra/launcher=submitit_slurm must be typed where {' and '.join(OF_SLURM)} are, on a machine of the "
            f"cluster, got a machine without {' and '.join(missing)}; type {HERE}"
        )


def explain_launcher(error: BaseException) -> str | None:
    """Return the message for a plugin that is missing, incomplete or cannot start; None for other errors."""
    group, _, name = str(getattr(error, "missing_cfg_file", None) or "").strip("/").rpartition("/")
    if group in EXTRAS:
        return _not_there(group, name, list(getattr(error, "options", None) or ["basic"]))
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    plugin = next(((at, found) for at, file in enumerate(frames) if (found := PLUGIN.search(file))), None)
    remote = error.__cause__ is not None or type(error).__name__ == "FailedJobError"  # an error in a cell
    if plugin is None or remote:
        return None
    at, found = plugin
    if any("accordion_bench" in file.split("site-packages")[-1] for file in frames[at:]):
        return None
    name, kind = found.groups()
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return f"hydra/{kind} of {name} needs {package}, which is not installed; type pip install {package}"
    said = (str(error) or type(error).__name__).splitlines()[0]
    return f"hydra/{kind} of {name} must be able to start here, got: {said}; type {HERE}"


def _not_there(group: str, name: str, there: list[str]) -> str:
    extras = EXTRAS[group]
    extra = next(iter(extras.values()))
    if name in extras:
        asked = f"{group}={name}{', which +search= chooses' if extra == 'optuna' else ''}"
        package = name.partition("_")[0]
        return f"{package} must be installed for {asked}, and is not; type pip install 'accordion-bench[{extra}]'"
    known = [*there, *(other for other in extras if other not in there)]
    all_there = set(extras) <= set(there)
    instead = f"{group}={closest(name, known)}" if all_there else f"pip install 'accordion-bench[{extra}]' for all"
    return f"{group} must be one of {', '.join(known)}, got {name}; type {instead}"

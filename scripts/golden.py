"""Golden runs: short runs with all their results, to prove that a code change changes nothing.

    python -m scripts.golden                # make the records anew, from the code in the current directory
    python -m scripts.golden powersgd topk  # those whose names contain one of these words
    python -m scripts.golden --compare      # compare the code in the current directory with them

A record contains the overrides, bytes by column, plans and decisions per epoch, losses and metric in full precision, a
checksum of the final weights, and the machine. Runs are equal to the last digit only on one kind of machine, because
sums round differently elsewhere. `tests/golden/test_golden.py` compares the values that must be equal everywhere.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.golden_runs import RUNS

RECORDS = Path(__file__).resolve().parents[1] / "tests" / "golden"
FIRST = 0.001  # how far the training loss of the first epoch may be off, relative; 0.00004 was the most
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def command(overrides: Sequence[str]) -> None:
    """Run overrides in this process: the only function that uses the package.

    Raises:
        RuntimeError: the run did not finish; the message contains its output.
    """
    from accordion_bench import train
    from accordion_bench.config.compose import compose

    typed = {key: value for key, _, value in (item.partition("=") for item in overrides)}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            train.run(compose(list(overrides)), typed)
    except Exception as error:
        raise RuntimeError(f"{error!r} of {' '.join(overrides)}\n{said.getvalue()}") from error


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Set one thread in this process and its child processes, so that sums are always taken in the same order."""
    import torch

    threads, environ = torch.get_num_threads(), {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in environ.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def machine() -> dict[str, Any]:
    """Return the properties of the machine on which the last digits depend."""
    import torch

    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """Return vendor, family and model: libraries choose their loops by these, and by cache sizes."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    named = [facts[key] for key in ("vendor_id", "cpu family", "model") if key in facts]
    return " ".join(named) or platform.machine()


# ---- what a run gave


def result(folder: Path) -> dict[str, Any]:
    """Return the recorded part of a finished run: all values that no clock has measured.

    The weights are those of the newest checkpoint, which must be the one of the last step.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    counted = [key for key in rows[0] if key.endswith(("_bytes", "rounds")) or key == "paper_floats"]
    judged = ["train_loss", "test_loss", "lr", summary["metric_name"], "compression_error", "norms"]
    return {
        "steps": summary["steps"],
        "metric_name": summary["metric_name"],
        "metric": summary["metric"],
        "weights": weights(folder, summary["steps"]),
        "bytes": {key: [row[key] for row in rows] for key in sorted(counted)},
        "values": {key: [row[key] for row in rows] for key in sorted(judged) if key in rows[0]},
        "plans": [row["plan"] for row in rows],
        "decisions": [without(row["decisions"]) for row in rows],
    }


def without(value: Any, names: Sequence[str] = ()) -> Any:
    """Return a nested value without these keys, and without values that a clock has measured."""
    if isinstance(value, dict):
        kept = [key for key in value if key not in names and "seconds" not in key]
        return {key: without(value[key], names) for key in kept}
    return [without(item, names) for item in value] if isinstance(value, list) else value


def weights(folder: Path, step: int) -> str:
    """Return the sha256 of all parameters and buffers after a step, by name: common ones and each worker's own."""
    import torch

    found = hashlib.sha256()
    path = folder / "checkpoint" / f"step-{step:08d}"
    files = sorted(path.glob("*.pt"))
    if not files:
        raise RuntimeError(f"there is no checkpoint of step {step}, the last one")
    for file in files:
        state = torch.load(file, map_location="cpu", weights_only=True)
        own = state.get("replica") or {}
        for part in (state.get("parameters"), state.get("buffers"), own.get("parameters")):
            for name, tensor in sorted((part or {}).items()):
                found.update(f"{file.name} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def ran(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Return the result of a new run whose last checkpoint is after the given number of steps."""
    with tempfile.TemporaryDirectory(prefix="golden-") as runs:
        command([*overrides, f"checkpoint.every={steps}", f"paths.runs={runs}"])
        (folder,) = Path(runs).glob("*/summary.json")
        return result(folder.parent)


def made(name: str) -> dict[str, Any]:
    """Return a golden run's record: run once to count its steps, once more with a checkpoint after the last one."""
    run = RUNS[name]
    with tempfile.TemporaryDirectory(prefix="golden-") as runs:
        command([*run.overrides, f"paths.runs={runs}"])
        (file,) = Path(runs).glob("*/summary.json")
        first = json.loads(file.read_text(encoding="utf-8"))
    found = ran(run.overrides, first["steps"])
    assert found["metric"] == first["metric"], "a checkpoint must change nothing"
    return {
        "name": name,
        "overrides": run.overrides,
        "on_rounding": list(run.on_rounding),
        "loss_within": run.loss_within,
        "metric_within": run.metric_within,
        "commit": commit(),
        "python": platform.python_version(),
        "machine": machine(),
        **found,
    }


def commit() -> str:
    """Return the commit of the current directory; with `+changes` if the code differs from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    asked = ["git", "status", "--porcelain", "--untracked-files=no", "--", "accordion_bench", "conf"]
    changed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return head + ("+changes" if changed else "")


def records() -> dict[str, dict[str, Any]]:
    """Return all records by name."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RECORDS.glob("*.json"))}


def written(record: dict[str, Any]) -> str:
    """Return a record as JSON with a line for each key, column and epoch."""

    def lines(value: Any, depth: int) -> str:
        if depth and isinstance(value, dict) and value:
            inner = [f"{json.dumps(key)}: {lines(item, depth - 1)}" for key, item in value.items()]
            return "{\n" + ",\n".join(inner) + "\n}"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
        return json.dumps(value)

    return lines(record, 2) + "\n"


# ---- comparing


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return the positions at which two nested values differ, to the last digit."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [found for key in keys for found in differences(old.get(key), new.get(key), f"{where}/{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [f for i, (a, b) in enumerate(zip(old, new, strict=True)) for f in differences(a, b, f"{where}/{i}")]
    return [] if old == new else [f"{where.lstrip('/')}: {old} is now {new}"]


def again(record: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a new run of a record's overrides."""
    return ran(record["overrides"], record["steps"])


def everywhere(record: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the differences between a new result and a record in the values that must be equal on any machine.

    These are bytes and plans, except for those that the record declares to depend on rounding; the training loss of the
    first epoch, before training has amplified the last digits; and final loss and metric, within the record's
    tolerance.
    """
    old, now = ({"bytes": x["bytes"], "plans": x["plans"]} for x in (record, new))
    found = differences(without(old, record["on_rounding"]), without(now, record["on_rounding"]))
    scale = record["metric"] if record["metric_name"] == "perplexity" else 1.0
    losses = record["values"]["train_loss"][0], record["values"]["test_loss"][-1]
    found += _further("training loss of the first epoch", losses[0], new["values"]["train_loss"][0], FIRST, losses[0])
    found += _further("final test loss", losses[1], new["values"]["test_loss"][-1], record["loss_within"], losses[1])
    return found + _further("metric", record["metric"], new["metric"], record["metric_within"], scale)


def _further(what: str, old: float, new: float, within: float | None, scale: float) -> list[str]:
    """Yield a line if a value is outside its tolerance."""
    if within is None or abs(new - old) <= within * scale:
        return []
    return [f"{what}: {old} is now {new}, further off than {within * scale:.3g}"]


def exactly(record: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return all differences between a new result and a record."""
    return differences({key: record[key] for key in new}, new)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only runs whose names contain one of these")
    parser.add_argument("--compare", action="store_true", help="compare with the records instead of making them")
    args = parser.parse_args()
    os.environ.update(ONE_THREAD)  # before torch is imported
    with one_thread():
        names = [name for name in (records() if args.compare else RUNS) if any(w in name for w in args.words or [""])]
        return compare(names) if args.compare else make(names)


def make(names: Sequence[str]) -> int:
    """Make records."""
    RECORDS.mkdir(exist_ok=True)
    for name in names:
        record = made(name)
        (RECORDS / f"{name}.json").write_text(written(record), encoding="utf-8")
        print(f"{name:<32}{record['steps']:>4} steps   {record['metric_name']} {record['metric']:.4f}", flush=True)
    print(f"{len(names)} records")
    return 0


def compare(names: Sequence[str]) -> int:
    """Print a line per run; return 1 if one differs: to the last digit on its record's machine, else `everywhere`."""
    different, here = 0, machine()
    for name in names:
        record, began = records()[name], time.monotonic()
        same_machine = record["machine"] == here
        if not same_machine:
            print(f"{name}: made on another machine, {record['machine']}, this one is {here}")
        try:
            found = (exactly if same_machine else everywhere)(record, again(record))
        except RuntimeError as failed:
            found = [str(failed)]
        different += bool(found)
        print(f"{name:<32}{'DIFFERENT' if found else 'the same':<12}{time.monotonic() - began:5.1f} s", flush=True)
        for line in found[:5]:
            print(f"    {line[:400]}")
    print(f"{len(names) - different} of {len(names)} runs are the same, to the last digit where the machine is")
    return int(bool(different) or not names)


if __name__ == "__main__":
    raise SystemExit(main())

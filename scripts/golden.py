"""Golden runs: short runs with everything that they gave, to prove that a change of the code changes nothing.

    python scripts/golden.py                # make the records anew, from the code in the current directory
    python scripts/golden.py powersgd topk  # those whose names contain one of these words
    python scripts/golden.py --compare      # compare the code in the current directory with them, to the last digit

A record says what was typed, bytes by column, plans and decisions per epoch, losses and metric in full precision, a
checksum of the final weights, and the machine. To the last digit runs are equal only on one kind of machine: elsewhere
sums round differently. `tests/golden/test_golden.py` compares what must be equal everywhere.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parents[1] / "tests" / "golden"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

IMAGES = [
    *("model=resnet8", "dataset=synthetic", "dataset.size=8", "dataset.train_size=48", "dataset.test_size=32"),
    *("batch_size=4", "epochs=3", "schedule.warmup_epochs=1", "optimizer.lr=0.05"),
]
DIGITS = [
    *("model=resnet8", "dataset=digits", "dataset.subset=48", "dataset.limit_eval=32", "batch_size=4", "epochs=3"),
    *("schedule.warmup_epochs=1", "optimizer.lr=0.05"),
]
TEXT = [
    *("model=lstm_small", "model.hidden=16", "dataset=synthetic_text", "dataset.vocabulary=50", "dataset.bptt=5"),
    *("dataset.train_words=400", "dataset.test_words=60", "batch_size=4", "epochs=3", "schedule.warmup_epochs=1"),
]
ONE_PROCESS = ["device=cpu", "comm=simulated", "workers=4"]
TWO_BY_TWO = ["device=cpu", "comm=gloo", "comm.processes=2", "comm.workers_per_process=2"]
FOUR_BY_ONE = ["device=cpu", "comm=gloo", "comm.processes=4", "comm.workers_per_process=1"]
TWO_BY_ONE = ["device=cpu", "comm=gloo", "comm.processes=2", "comm.workers_per_process=1"]
CRITICAL = ["adaptive.accordion.interval=1", "adaptive.accordion.min_hold=0", "schedule.milestones=[]"]
LATE_DROP = ["epochs=4", "schedule.milestones=[3]"]
SMALL_PERIOD = ["sync.period=3"]


@dataclass(frozen=True)
class Run:
    """One golden run.

    Args:
        typed: the overrides, later ones replace earlier ones.
        on_rounding: names of columns and parts of plans that may differ where sums round differently. Found by trial:
            these differed when only AVX2, or only SSE, was allowed.
        loss_within: how far the final test loss may then be off, relative.
        metric_within: and the metric; of an accuracy absolute, of a perplexity relative.
    """

    typed: Sequence[str]
    on_rounding: tuple[str, ...] = ()
    loss_within: float = 0.05
    metric_within: float = 0.1

    @property
    def overrides(self) -> list[str]:
        """What is typed, each key once."""
        return list({item.partition("=")[0]: item for item in self.typed}.values())


def images(*typed: str, **options: Any) -> Run:
    """Four workers in this process train a ResNet-8 on tiny images."""
    return Run([*IMAGES, *ONE_PROCESS, *typed], **options)


def text(*typed: str, **options: Any) -> Run:
    """Four workers in this process train a language model."""
    return Run([*TEXT, *ONE_PROCESS, *typed], **options)


FITTED = ("codebooks",)
SIZES = ("payload_bytes", "wire_bytes")

COMPRESSORS = {
    "none": images(),
    "fp16": images("compressor=fp16"),
    "bf16": images("compressor=bf16", "compressor.error_feedback=true"),
    "fp8": images("compressor=fp8"),
    "int8": images("compressor=int8"),
    "int8_two_way": images("compressor=int8", "compressor.collective=two_way"),
    "signsgd": images("compressor=signsgd", "optimizer.lr=0.0005"),
    "signum": images("compressor=signum", "optimizer.lr=0.0005"),
    "efsignsgd": images("compressor=efsignsgd", "compressor.block=bucket", "compressor.block_size=256"),
    "onebit": images("compressor=onebit"),
    "distefblocksgd": images("compressor=distefblocksgd"),
    "qsgd": images("compressor=qsgd"),
    "qsgd_elias": images(
        "compressor=qsgd", "compressor.bits=3", "compressor.entropy=elias", on_rounding=("entropy_bytes",)
    ),
    "qsgdinf_two_way": images("compressor=qsgdinf", "compressor.collective=two_way", "compressor.scope=model"),
    "nuqsgd": images("compressor=nuqsgd", "compressor.error_feedback=true"),
    "trn": images("compressor=trn"),
    "terngrad": images("compressor=terngrad"),
    "natural": images("compressor=natural"),
    "topk": images("compressor=topk", "compressor.density=0.02", "optimizer.nesterov=true"),
    "topk_model": images("compressor=topk", "compressor.scope=model", "compressor.residual_decay=0.95"),
    "topk_two_way": images("compressor=topk", "compressor.collective=two_way", "compressor.density=0.05"),
    "threshold": images("compressor=threshold", "compressor.density=0.05", on_rounding=SIZES),
    "randomk": images("compressor=randomk", "compressor.residual=aggregate"),
    "dgc": images("compressor=dgc", "compressor.density=0.01", "compressor.warmup_epochs=2", "compressor.clip=2"),
    "adacomp": images("compressor=adacomp", on_rounding=SIZES),
    "powersgd": images("compressor=powersgd"),
    "powersgd_aggregate": images(
        *("compressor=powersgd", "compressor.residual=aggregate", "compressor.start_step=3", "compressor.rank=1"),
        *("compressor.min_compression_rate=0", "compressor.orthonormalisation=gramschmidt"),
    ),
    "atomo": images("compressor=atomo", "epochs=2"),
    "demo": images("compressor=demo", "optimizer.momentum=0", "optimizer.lr=0.002"),
}

POLICIES = {
    "accordion_powersgd": images(
        "compressor=powersgd", "adaptive=accordion", *CRITICAL, "adaptive.accordion.eta=0.13", *LATE_DROP
    ),
    "accordion_topk": images("compressor=topk", "adaptive=accordion", *CRITICAL, "adaptive.accordion.eta=9"),
    "accordion_bits": images("compressor=qsgd", "adaptive=accordion", *CRITICAL, "adaptive.accordion.statistic=update"),
    "accordion_alq": images(
        *("compressor=qsgd", "adaptive=[accordion,alq]", *CRITICAL, "adaptive.alq.update_at=[0,5]"),
        *("adaptive.alq.stat_samples=2", "adaptive.accordion.weak=3", "adaptive.accordion.strong=2"),
        on_rounding=FITTED,
        loss_within=0.25,
    ),
    "alq": images(
        *("compressor=qsgd", "compressor.bits=3", "adaptive=alq", "adaptive.alq.update_at=[0,5]"),
        *("adaptive.alq.stat_samples=3",),
        on_rounding=FITTED,
    ),
    "alqg": images(
        *("compressor=qsgd", "compressor.bits=3", "adaptive=alqg", "adaptive.alqg.update_at=[0,5]", "epochs=2"),
        *("adaptive.alqg.fit=empirical",),
        on_rounding=FITTED,
    ),
    "amq": images(
        "compressor=nuqsgd", "compressor.bits=3", "adaptive=amq", "adaptive.amq.update_at=[0,5]", on_rounding=FITTED
    ),
    "amqn": images(
        "compressor=qsgdinf", "compressor.bits=3", "adaptive=amqn", "adaptive.amqn.update_at=[2]", on_rounding=FITTED
    ),
    "schedule": images("compressor=powersgd", "adaptive=schedule", "adaptive.schedule.ranges=[[0,1,dense],[1,null,1]]"),
    "adaqs": images("compressor=qsgd", "adaptive=adaqs", "adaptive.adaqs.interval=1", "adaptive.adaqs.factor=1.05"),
    "lgreco": images("compressor=powersgd", "adaptive=lgreco", "adaptive.lgreco.samples=2", "adaptive.lgreco.every=3"),
    "accordion_lgreco": images(
        "compressor=topk", "adaptive=[accordion,lgreco]", *CRITICAL, "adaptive.lgreco.samples=2"
    ),
    "gravac": images(
        *("compressor=topk", "adaptive=gravac", "adaptive.gravac.window=2", "adaptive.gravac.interval=2"),
        *("adaptive.gravac.smallest=0.01", "adaptive.gravac.eps=0.5"),
    ),
    "accordion_batch": images(
        *("adaptive=accordion_batch", "adaptive.accordion_batch.interval=1", "adaptive.accordion_batch.min_hold=0"),
        *("adaptive.accordion_batch.factor=2", "adaptive.accordion_batch.eta=9", "schedule.milestones=[]"),
    ),
    "adabatch": images("adaptive=adabatch", "adaptive.adabatch.freq=1"),
    "grow_batch": images("adaptive=grow_batch", "adaptive.grow_batch.cap=12", "schedule.milestones=[1,2]"),
    "noise_scale": images("adaptive=noise_scale", "adaptive.noise_scale.every=2", "adaptive.noise_scale.cap=8"),
    "accordion_sync": images(
        *("adaptive=accordion_sync", "adaptive.accordion_sync.interval=1", "adaptive.accordion_sync.min_hold=0"),
        *("adaptive.accordion_sync.strong=4", "adaptive.accordion_sync.eta=9", "schedule.milestones=[]"),
    ),
    "adacomm": images("adaptive=adacomm", "adaptive.adacomm.every=2", *SMALL_PERIOD),
    "qsr": images("adaptive=qsr", "adaptive.qsr.alpha=0.1", "sync.period=2", "schedule.milestones=[1,2]"),
}

SCHEMES = {
    "local_sgd": images("sync=local_sgd", *SMALL_PERIOD),
    "local_sgd_powersgd": images("adaptive=local_sgd", "compressor=powersgd", *SMALL_PERIOD, "sync.buffers=average"),
    "post_local_sgd": images("sync=post_local_sgd", *SMALL_PERIOD, "schedule.milestones=[1]", "compressor=topk"),
    "slowmo": images("adaptive=slowmo", "sync.period=4"),
    "slowmo_qsgd_alq": images(
        *("sync=slowmo", *SMALL_PERIOD, "compressor=qsgd", "adaptive=alq", "adaptive.alq.update_at=[1]"),
        on_rounding=FITTED,
    ),
    "diloco": images("adaptive=diloco", "sync.period=4", "optimizer=adamw", "optimizer.lr=0.001"),
    "overlap_local_sgd": images("sync=overlap_local_sgd", "sync.delay=1", "compressor=int8"),
    "overlap_local_sgd_cocod": images("sync=overlap_local_sgd", "sync.merge=cocod", "sync.beta=0"),
    "hierarchical": images("sync=hierarchical", "sync.groups=[[2,2],[4,4]]"),
    "hierarchical_topk": images("sync=hierarchical", "sync.groups=[[2,2],[4,4]]", "compressor=topk"),
}

FORWARD = {
    "text": text(),
    "text_powersgd": text(
        *("compressor=powersgd", "adaptive=accordion", *CRITICAL, "clip_norm=0.4", "optimizer.nesterov=true"),
    ),
    "text_plus_gradient": text("optimizer=sgd_plus_gradient", "compressor=topk", "clip_norm=0.3", "clip_at=after"),
    "text_slowmo": text("sync=slowmo", "sync.period=4", "compressor=fp16"),
    "digits": Run([*DIGITS, *ONE_PROCESS, "bn=average", "compressor=powersgd"]),
    "micro_batches": images("micro_batch_size=2", "clip_norm=0.5", "bn=recompute", "schedule=cosine"),
    "bn_rank0": images("bn=rank0", "optimizer=adamw", "optimizer.lr=0.001", "schedule=constant"),
    "bn_local": images("bn=local", "channels_last=true"),
    "bfloat16": images("precision=bfloat16", "compressor=powersgd", "epochs=2"),
    "measured": images(
        "compressor=powersgd", "measure.norms=true", "measure.error=true", "network=internet", "epochs=2"
    ),
}

PLACEMENTS = {
    "two_by_two": Run([*IMAGES, *TWO_BY_TWO, "compressor=powersgd", "adaptive=accordion", *CRITICAL]),
    "two_by_two_late": Run(
        [*IMAGES, *TWO_BY_TWO, "compressor=powersgd", "comm.overlap=false", "comm.bucket_cap_mb=0.01"]
    ),
    "two_by_two_hierarchical": Run(
        [*IMAGES, *TWO_BY_TWO, "sync=hierarchical", "sync.groups=[[2,2],[4,4]]", "compressor=topk"]
    ),
    "two_by_two_text": Run([*TEXT, *TWO_BY_TWO, "compressor=topk", "clip_norm=0.4"]),
    "four_by_one": Run([*IMAGES, *FOUR_BY_ONE, "compressor=topk", "comm.bucket_cap_mb=0.01"]),
    "four_by_one_dense": Run([*IMAGES, *FOUR_BY_ONE, "bn=average"]),
    "four_by_one_overlap_local_sgd": Run([*IMAGES, *FOUR_BY_ONE, "sync=overlap_local_sgd"]),
    "four_by_one_dist_ef": Run([*IMAGES, *FOUR_BY_ONE, "compressor=distefblocksgd"]),
    "ddp": Run([*IMAGES, *TWO_BY_ONE, "comm.engine=ddp"]),
    "ddp_fp16": Run([*IMAGES, *TWO_BY_ONE, "comm.engine=ddp", "compressor=fp16"]),
}

RUNS = {**COMPRESSORS, **POLICIES, **SCHEMES, **FORWARD, **PLACEMENTS}

# those that start processes or take long, and those much like another one; the kept test leaves them to `-m slow`
SLOW = {
    *(PLACEMENTS.keys() - {"two_by_two", "ddp"}),
    *("int8_two_way", "qsgd_elias", "topk_two_way", "topk_model", "nuqsgd", "signum", "bf16", "trn"),
    *("accordion_lgreco", "accordion_bits", "alqg", "amqn", "slowmo_qsgd_alq", "overlap_local_sgd_cocod"),
    *("hierarchical_topk", "text_plus_gradient", "text_slowmo", "bn_rank0", "bn_local", "measured"),
}


def command(overrides: Sequence[str]) -> None:
    """Run overrides in this process: all that is used of the package.

    Raises:
        RuntimeError: the run did not come to its end; with what it has said.
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
    """One thread here and in processes that are started, so that sums are always taken in the same order."""
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
    """What the last digits hang on."""
    import torch

    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """Vendor, family and model: libraries choose their loops by them, and by caches."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    named = [facts[key] for key in ("vendor_id", "cpu family", "model") if key in facts]
    return " ".join(named) or platform.machine()


# ---- what a run gave


def result(folder: Path) -> dict[str, Any]:
    """What is kept of a finished run: all that no clock has measured.

    The weights are those of the newest checkpoint, which must be that of the last step.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
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
    """A nested value without these keys, and without what a clock has measured."""
    if isinstance(value, dict):
        kept = [key for key in value if key not in names and "seconds" not in key]
        return {key: without(value[key], names) for key in kept}
    return [without(item, names) for item in value] if isinstance(value, list) else value


def weights(folder: Path, step: int) -> str:
    """sha256 of all parameters and buffers after a step, by name: of the common ones, and of every worker's own."""
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
    """The result of a new run that leaves a checkpoint after so many steps, its last one."""
    with tempfile.TemporaryDirectory(prefix="golden-") as runs:
        command([*overrides, f"checkpoint.every={steps}", f"paths.runs={runs}"])
        (folder,) = Path(runs).glob("*/summary.json")
        return result(folder.parent)


def made(name: str) -> dict[str, Any]:
    """The record of a golden run: run once to count its steps, once more with a checkpoint after the last one."""
    run = RUNS[name]
    with tempfile.TemporaryDirectory(prefix="golden-") as runs:
        command([*run.overrides, f"paths.runs={runs}"])
        (file,) = Path(runs).glob("*/summary.json")
        first = json.loads(file.read_text())
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
    """The commit that is checked out in the current directory; with `+changes` where the code differs from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    asked = ["git", "status", "--porcelain", "--untracked-files=no", "--", "accordion_bench", "conf"]
    changed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return head + ("+changes" if changed else "")


def records() -> dict[str, dict[str, Any]]:
    """All records by name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RECORDS.glob("*.json"))}


def written(record: dict[str, Any]) -> str:
    """A record as JSON with a line for each key, column and epoch."""

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
    """Where two nested values are not the same, to the last digit."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [found for key in keys for found in differences(old.get(key), new.get(key), f"{where}/{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [f for i, (a, b) in enumerate(zip(old, new, strict=True)) for f in differences(a, b, f"{where}/{i}")]
    return [] if old == new else [f"{where.lstrip('/')}: {old} is now {new}"]


def again(record: dict[str, Any]) -> dict[str, Any]:
    """The result of a new run of a record's overrides."""
    return ran(record["overrides"], record["steps"])


def everywhere(record: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """How a new result differs from a record in what must be equal on any machine.

    Bytes and plans, but for what the record says to hang on rounding; and final loss and metric, within its tolerance.
    """
    old, now = ({"bytes": x["bytes"], "plans": x["plans"]} for x in (record, new))
    found = differences(without(old, record["on_rounding"]), without(now, record["on_rounding"]))
    losses = [x["values"]["test_loss"][-1] for x in (record, new)]
    metrics = [record["metric"], new["metric"]]
    scale = metrics[0] if record["metric_name"] == "perplexity" else 1.0
    if not abs(losses[1] - losses[0]) <= record["loss_within"] * losses[0]:
        found.append(f"final test loss: {losses[0]} is now {losses[1]}, further off than {record['loss_within']:.0%}")
    if not abs(metrics[1] - metrics[0]) <= record["metric_within"] * scale:
        found.append(
            f"metric: {metrics[0]} is now {metrics[1]}, further off than {record['metric_within'] * scale:.3g}"
        )
    return found


def exactly(record: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """How a new result differs from a record at all."""
    return differences({key: record[key] for key in new}, new)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only runs whose names contain one of these")
    parser.add_argument("--compare", action="store_true", help="compare with the records instead of making them")
    args = parser.parse_args()
    os.environ.update(ONE_THREAD)  # before torch is imported
    sys.path.insert(0, os.getcwd())  # before an installed package
    with one_thread():
        names = [name for name in (records() if args.compare else RUNS) if any(w in name for w in args.words or [""])]
        return compare(names) if args.compare else make(names)


def make(names: Sequence[str]) -> int:
    """Make records."""
    RECORDS.mkdir(exist_ok=True)
    for name in names:
        record = made(name)
        (RECORDS / f"{name}.json").write_text(written(record))
        print(f"{name:<32}{record['steps']:>4} steps   {record['metric_name']} {record['metric']:.4f}", flush=True)
    print(f"{len(names)} records")
    return 0


def compare(names: Sequence[str]) -> int:
    """Print a line for each run; 1 where one differs."""
    different, here = 0, machine()
    for name in names:
        record, began = records()[name], time.monotonic()
        if record["machine"] != here:
            print(f"{name}: made on another machine, {record['machine']}, this one is {here}")
        try:
            found = exactly(record, again(record))
        except RuntimeError as failed:
            found = [str(failed)]
        different += bool(found)
        print(f"{name:<32}{'DIFFERENT' if found else 'the same':<12}{time.monotonic() - began:5.1f} s", flush=True)
        for line in found[:5]:
            print(f"    {line[:400]}")
    print(f"{len(names) - different} of {len(names)} runs are the same to the last digit")
    return int(bool(different) or not names)


if __name__ == "__main__":
    raise SystemExit(main())

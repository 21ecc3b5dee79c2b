"""The run folders of a claim without their checkpoints, as one committed file from which every table is made."""

import io
import json
import lzma
import tarfile
from pathlib import Path

from accordion_bench.report.read import find_runs, read_run
from accordion_bench.runs import durable
from scripts.claims.outcome import has_ended
from scripts.claims.plan import RUNS

KEPT = ("config.yaml", "environment.json", "metrics.jsonl", "summary.json", "done")


def archive_of(claim: str) -> Path:
    """Return the path of a claim's archive."""
    return Path("results/claims") / claim / "runs.tar.xz"


def unpack(claim: str) -> None:
    """Unpack the archived runs into the folder of new runs; existing files are kept."""
    file = archive_of(claim)
    if not file.is_file():
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as packed:
        missing = [member for member in packed.getmembers() if not (RUNS / member.name).exists()]
        packed.extractall(RUNS, missing, filter="data")


def pack(claim: str) -> None:
    """Write all runs of a claim that have ended, including those at a rate that is no longer chosen.

    Args:
        claim: name of the claim.
    """
    folders = [folder for folder in sorted(find_runs([RUNS / claim])) if has_ended(read_run(folder))]
    if not folders:
        return
    file = archive_of(claim)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with tarfile.open(part, "w:xz", preset=9 | lzma.PRESET_EXTREME) as packed:
        for name in KEPT:  # like beside like: smaller
            for folder in folders:
                if (folder / name).is_file():
                    _add(packed, folder / name)
    durable.replace(part, file)


def _add(packed: tarfile.TarFile, file: Path) -> None:
    """Add a file without its owner and time; a command loses the path of Python, which is machine-specific."""
    content = file.read_bytes()
    if file.name == "environment.json":
        seen = json.loads(content)
        interpreter, _, typed = seen.get("command", "").partition(" ")
        content = durable.json_text({**seen, "command": f"{Path(interpreter).name} {typed}"}, indent=1).encode()
    member = tarfile.TarInfo(str(file.relative_to(RUNS)))
    member.size = len(content)
    packed.addfile(member, io.BytesIO(content))

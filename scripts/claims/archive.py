"""The run folders of a claim without their checkpoints, as one committed file that every table is made from."""

import tarfile
from pathlib import Path

from scripts.claims.outcome import Outcome
from scripts.claims.plan import RUNS

KEPT = ("config.yaml", "environment.json", "metrics.jsonl", "summary.json", "done")


def archive_of(claim: str) -> Path:
    """Where it is."""
    return Path("results/claims") / claim / "runs.tar.xz"


def unpack(claim: str) -> None:
    """Put the archived runs where new ones go; what is there stays."""
    file = archive_of(claim)
    if not file.is_file():
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as packed:
        missing = [member for member in packed.getmembers() if not (RUNS / member.name).exists()]
        packed.extractall(RUNS, missing, filter="data")


def pack(claim: str, outcomes: list[Outcome]) -> None:
    """Write the runs that have ended, those that were unpacked among them.

    Args:
        claim: whose.
        outcomes: of all its cells.
    """
    file = archive_of(claim)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz", preset=9) as packed:
        for found in outcomes:
            if not found.ended or found.run is None:
                continue
            for name in KEPT:
                if (found.run.path / name).is_file():
                    packed.add(found.run.path / name, filter=_anonymous, arcname=_place(found.run.path / name))


def _place(file: Path) -> str:
    return str(file.relative_to(RUNS))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member

"""Honest run folders with random damage: each is a result or a sentence, never a traceback, a crash or a hang."""

import random
import time
from pathlib import Path

import pytest

from accordion_bench.report import read
from accordion_bench.report.render import write
from accordion_bench.report.render.write import group_sound_runs
from tests.report.hostile.corpus import FASTER, MODELLED, environment, several, summary
from tests.report.test_report import accordion, run_folder

FILES = ("config.yaml", "metrics.jsonl", "summary.json", "environment.json")
SECONDS = 10  # for one folder, however slow the machine is
# what programs stumble over, in the place of anything else
TOKENS = (
    *b"[ ] { } \" ' : , null true NaN -Infinity 1e999 1e-999 -1 0 *a &a | # % @ ` _target_ os.system".split(),
    *(b"\\ud800", b"\\u0000"),
    *(
        b"!!binary ",
        b"!!python/name:os.system ",
        b"<<: ",
        b"- ",
        b"? ",
        b"\n",
        b"\r",
        b"\t",
        b"\0",
        b"\xff",
        b"\xe2\x80\xae",
    ),
    *(b"9" * 400, b"0x" + b"f" * 400, b"[" * 300, b"{a: " * 300, b" " * 300, b"$\\frac{$", b"\x1b[2J", b"<b>", b"=1+1"),
)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """One to four random changes."""
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(data) + 1), draw.choice((1, 1, 2, 4, 8, 64, 512))
        part, token = data[at : at + length], draw.choice(TOKENS)
        how = draw.randrange(7)
        if how == 0:  # bits
            part = bytes(byte ^ (1 << draw.randrange(8)) for byte in part)
        elif how == 1:
            part = draw.randbytes(len(part))
        elif how == 2:
            part = b""
        elif how == 3:
            part = part * draw.choice((2, 3, 50))
        elif how == 4:
            part = token + part
        elif how == 5:
            part = token
        else:  # a value: what stands between two signs
            ends = [end for end in (data.find(b",", at), data.find(b"\n", at)) if end >= 0]
            start, end = data.rfind(b" ", 0, at) + 1, min(ends, default=len(data))
            at, length, part = start, end - start, token
        data = data[:at] + part + data[at + length :]
    return data


def fuzz(root: Path, cases: int, seed: int) -> dict[str, int]:
    """How many of the damaged folders have a result, and how many a sentence."""
    draw, found = random.Random(seed), {"result": 0, "sentence": 0}
    folders = [run_folder(root, "topk", epochs=3, adaptive=accordion()), run_folder(root, "none", epochs=2)]
    lab = {"rate": 1e8, "slow_host": {"2": 2e7}, "cuts": [[3, 1.5]], "delay": 0.01}
    about = {"netlab": lab, "versions": {"torch": "2"}, "gpus": ["a"], "threads": 1, "load": 0.5}
    several(MODELLED, FASTER, summary(processes=1, went_dense={"a": 1}), environment(**about))(folders[1])
    honest = {folder: {name: (folder / name).read_bytes() for name in FILES} for folder in folders}
    for _ in range(cases):
        folder, name = draw.choice(folders), draw.choice(FILES)
        (folder / name).write_bytes(damaged(honest[folder][name], draw))
        start = time.monotonic()
        run = read.read_run(folder)
        assert run.problem.isprintable() and run.label.isprintable()
        if run.finished:
            runs, _, _, (markdown, _) = group_sound_runs([run], write.texts)
            assert all(line.isprintable() for text in markdown for line in text.splitlines())
            run = runs[0]
        assert time.monotonic() - start < SECONDS
        found["result" if run.finished else "sentence"] += 1
        (folder / name).write_bytes(honest[folder][name])
    return found


def test_some_damaged_folders(tmp_path):
    found = fuzz(tmp_path, cases=150, seed=0)
    assert min(found.values()) > 20  # neither is all of it


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 8))
def test_many_damaged_folders(seed, tmp_path):
    fuzz(tmp_path, cases=1000, seed=seed)

"""make install: hashes for all that it installs, and the environment of before until the new one is whole."""

import functools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

# an installer that writes down what is asked of it; it fails, or takes its time, where the words hold $FAIL or $WAIT
UV = """#!/bin/sh
echo "$*" >>asked
case "$1" in
venv)
    mkdir -p .venv/bin
    printf '#!/bin/sh\\necho "$*" >>computed\\necho torch 1 torchvision 1\\n' >.venv/bin/python
    chmod +x .venv/bin/python
    ;;
pip)
    for word in "$@"; do case "$word" in /*) cp "$word" rest ;; esac; done
    case "$*" in *"${FAIL:-nothing}"*) exit 3 ;; *"${WAIT:-nothing}"*) touch waiting; sleep 20 ;; esac
    ;;
esac
"""
OLD = ".venv/old"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder with what setup.sh reads, an installer, and an environment that is there already."""
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "constraints.txt", "build-tools.txt"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "uv").write_text(UV)
    (folder / "bin" / "uv").chmod(0o755)
    (folder / ".venv").mkdir()
    (folder / OLD).touch()
    return folder


def start(checkout: Path, **environ: str) -> subprocess.Popen:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if key not in ("TORCH", "PYTHON")}
    return subprocess.Popen(
        ["bash", "scripts/setup.sh"],
        cwd=checkout,
        env={**kept, "PATH": path, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a suite that was started in the background ignores it, and so would what it starts
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def install(checkout: Path, **environ: str) -> tuple[int, str]:
    running = start(checkout, **environ)
    said, _ = running.communicate(timeout=60)
    return running.returncode, said


def environments(checkout: Path) -> list[str]:
    return sorted(path.name for path in checkout.glob(".venv*"))


def asked(checkout: Path) -> list[str]:
    return [line for line in (checkout / "asked").read_text().splitlines() if line.startswith("pip install")]


def test_all_but_our_own_package_is_compared_with_hashes(checkout):
    status, said = install(checkout)
    assert status == 0 and "installed into .venv: torch 1 torchvision 1" in said
    *others, own = asked(checkout)
    assert len(others) == 2 and all("--require-hashes" in words and "--no-build-isolation" in words for words in others)
    assert [words.split()[-1] for words in others] == ["build-tools.txt", "constraints.txt"]
    assert "--no-deps" in own and own.endswith("--editable .")
    assert environments(checkout) == [".venv"] and not (checkout / OLD).exists()


def test_kernels_are_compiled_once(checkout):
    assert install(checkout)[0] == 0
    assert (checkout / "computed").read_text().count("-m accordion_bench.conformance.compile_kernels\n") == 1


@pytest.mark.parametrize("where", ["build-tools.txt", "constraints.txt", "--editable"])
def test_a_failed_installation_leaves_the_old_environment(checkout, where):
    status, said = install(checkout, FAIL=where)
    assert status == 3 and said.endswith("nothing has been installed; .venv is what it was before\n")
    assert environments(checkout) == [".venv"] and (checkout / OLD).exists()


def test_a_first_installation_that_fails_leaves_nothing(checkout):
    shutil.rmtree(checkout / ".venv")
    assert install(checkout, FAIL="constraints.txt")[0] == 3
    assert environments(checkout) == []


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_installation_leaves_the_old_environment(checkout, signum, status):
    running = start(checkout, WAIT="constraints.txt")
    wait_for(checkout / "waiting")
    assert environments(checkout) == [".venv", ".venv.old"]
    os.killpg(running.pid, signum)  # as a terminal and a launcher do
    running.communicate(timeout=30)
    assert running.returncode == status
    assert environments(checkout) == [".venv"] and (checkout / OLD).exists()


def test_after_a_killed_installation_the_old_environment_is_still_the_old_one(checkout):
    running = start(checkout, WAIT="constraints.txt")
    wait_for(checkout / "waiting")
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate(timeout=30)
    assert environments(checkout) == [".venv", ".venv.old"]
    assert install(checkout, FAIL="build-tools.txt")[0] == 3
    assert environments(checkout) == [".venv"] and (checkout / OLD).exists()
    assert install(checkout)[0] == 0
    assert environments(checkout) == [".venv"] and not (checkout / OLD).exists()


def test_without_a_python_nothing_is_touched(checkout):
    status, said = install(checkout, PYTHON="/nowhere/python")
    assert status == 1 and "make install PYTHON=" in said
    assert (checkout / OLD).exists() and not (checkout / "asked").exists()


def test_another_build_of_torch_is_the_only_thing_without_hashes(checkout):
    status, said = install(checkout, TORCH="cpu")
    assert status == 0 and "TORCH=cpu: torch, torchvision and what these bring are not compared with hashes" in said
    _, others, own = asked(checkout)
    assert "--require-hashes --no-deps" in others
    assert "--torch-backend cpu" in own and own.endswith("--editable .") and "--no-deps" not in own
    whole, rest = ((checkout / name).read_text().splitlines() for name in ("constraints.txt", "rest"))
    left_out = {line.partition("==")[0] for line in set(whole) - set(rest) if "==" in line}
    assert {"torch", "torchvision", "triton", "nvidia-nccl-cu13", "cuda-bindings"} <= left_out
    assert all(name in ("torch", "torchvision", "triton") or name.startswith(("nvidia-", "cuda-")) for name in left_out)
    assert rest == [line for line in whole if line in set(rest)]


def test_make_installs_again_for_another_torch():
    """Where .venv is up to date, too."""
    for typed, expected in (["TORCH=cpu"], True), (["-o", ".venv/.installed"], False):
        shown = subprocess.run(["make", "-n", "install", *typed], cwd=ROOT, capture_output=True, text=True).stdout
        assert ("scripts/setup.sh" in shown) == expected


PYTHON = """#!/bin/sh
case "$*" in
"-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
"-m pip"*) echo "pip $*" >>asked; cp bin/other .venv/bin/uv ;;
*version*) echo torch 1 torchvision 1 ;;
esac
"""


def test_without_uv_pip_brings_it_with_its_hash(checkout):
    (checkout / "bin" / "uv").rename(checkout / "bin" / "other")
    mine = checkout.parent / "python"  # no blanks: PYTHON may name several
    mine.write_text(PYTHON)
    mine.chmod(0o755)
    tools = checkout / "tools"
    tools.mkdir()
    for tool in ("bash", "sh", "dirname", "rm", "mv", "mkdir", "cp", "sleep", "cat", "touch"):
        (tools / tool).symlink_to(shutil.which(tool))
    status, said = install(checkout, PATH=str(tools), PYTHON=str(mine))
    assert status == 0, said
    by_pip, *by_uv = (checkout / "asked").read_text().splitlines()
    assert "--require-hashes --requirement build-tools.txt" in by_pip and len(by_uv) == 3

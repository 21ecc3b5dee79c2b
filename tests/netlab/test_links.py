"""What a lab of hosts is while it lives, and what is left when it ends; needs root and network namespaces."""

import contextlib
import json
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from accordion_bench.netlab import __main__ as netlab_command
from accordion_bench.netlab import hosts, janitor, job
from accordion_bench.network.collective_costs import KINDS
from accordion_bench.network.links import read_measured_link, to_type
from accordion_bench.options.checks import ConfigError
from tests.kit.labs import lab
from tests.kit.paths import ROOT

pytestmark = [pytest.mark.netlab, pytest.mark.usefixtures("allowed")]
FILLED = 1448 / 1514  # of a full frame are data, as tbf counts it


def test_both_ends_of_a_link_are_limited_and_a_slow_host_more():
    with hosts.Hosts(3, 1e8, {2: 2e7}) as three:
        for host, shown in enumerate(["100Mbit", "100Mbit", "20Mbit"]):
            near = ["tc", "-n", three.namespace(host), "qdisc", "show", "dev", hosts.INTERFACE]
            far = ["tc", "-n", three._switch, "qdisc", "show", "dev", f"host{host}"]
            for command in (near, far):
                assert f"rate {shown} " in subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_a_probe_writes_what_each_kind_of_collective_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(netlab_command, "SECONDS", 0.5)
    with hosts.Hosts(2, 1e8) as two:
        assert netlab_command.probe(two, tmp_path) == 0
    link = read_measured_link(tmp_path / "link.json")
    assert set(link.kinds) == set(KINDS) and min(cost.bandwidth for cost in link.kinds.values()) > 0
    assert to_type(link) in capsys.readouterr().out


@pytest.mark.slow
def test_a_probe_finds_the_rate_that_a_link_is_limited_to(tmp_path, monkeypatch):
    """All-reduces fill it but for headers; other kinds do not, and have rates of their own. Wants a quiet machine."""
    monkeypatch.setattr(netlab_command, "SECONDS", 3.0)
    with hosts.Hosts(2, 1e8) as two:
        assert netlab_command.probe(two, tmp_path) == 0
    link = read_measured_link(tmp_path / "link.json")
    allowed = 1e8 * FILLED
    assert abs(link.kinds["all_reduce"].bandwidth / allowed - 1) < 0.1
    assert 0.3 * allowed < min(cost.bandwidth for cost in link.kinds.values())
    assert 0.5 * hosts.burst_bytes(1e8) < link.kinds["all_reduce"].burst < 2 * hosts.burst_bytes(1e8)


COUNTING = {"nf_conntrack_count", "valid_life_time", "preferred_life_time"}  # by themselves


def without_counts(shown: Any) -> Any:
    """What `ip` and `tc` show, but for what changes by itself."""
    if isinstance(shown, list):
        return [without_counts(item) for item in shown]
    if isinstance(shown, dict):
        return {key: without_counts(value) for key, value in shown.items() if key not in COUNTING}
    return shown


def own_network() -> dict[str, Any]:
    """Everything of the machine's own network that somebody could have changed."""
    shown = {}
    for words in ("address", "rule", "-6 rule", "route show table all", "-6 route show table all"):
        listed = subprocess.run(["ip", "-j", *words.split()], capture_output=True, text=True).stdout
        shown[words] = without_counts(json.loads(listed or "[]"))
    shown["qdiscs"] = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True).stdout
    if shutil.which("nft"):
        shown["nftables"] = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True).stdout
    for file in Path("/proc/sys/net").rglob("*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # some may only be written
            if file.is_file() and file.name not in COUNTING:
                shown[str(file)] = file.read_text()
    return shown


def test_the_machines_own_network_stays_as_it_is():
    """Before, during and after: addresses, links, routes, rules, queues, filters and the kernel's settings."""
    before = own_network()
    assert len(before) > 100
    with hosts.Hosts(2, 1e8) as two:
        assert two.run(["true"]).status == 0
        during = own_network()
    after = own_network()
    for key in before.keys() | during.keys() | after.keys():
        assert before.get(key) == during.get(key) == after.get(key), key


def test_hosts_of_an_owner_that_is_gone_are_removed():
    gone = janitor.new_lab()
    janitor.hold(gone).release()  # as the system does when its owner ends
    orphan, strange = f"{gone}-0", "ab-strange"
    try:
        for name in (orphan, strange):
            subprocess.run(["ip", "netns", "add", name], check=True)
        with hosts.Hosts(2) as two:
            assert orphan not in janitor.names()
            assert {strange, two.namespace(1)} <= set(janitor.names())
        assert two.namespace(1) not in janitor.names()
        assert not list(janitor.LOCKS.glob(f"ab-{os.getpid()}.*"))
    finally:
        subprocess.run(["ip", "netns", "delete", strange])


def test_a_lab_lives_even_where_its_process_cannot_be_seen():
    """A container counts its processes anew, and may share the namespaces."""
    elsewhere = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    look = "import os; from accordion_bench.netlab import janitor; assert os.getpid() < 9; janitor.remove_orphans()"
    with hosts.Hosts(2) as two:
        tried = subprocess.run([*elsewhere, look], cwd=ROOT, capture_output=True, text=True)
        if "unshare failed" in tried.stderr:
            pytest.skip(tried.stderr)
        assert tried.returncode == 0, tried.stderr
        assert two.namespace(1) in janitor.names()
        assert two.run(["true"]).status == 0


NOBODY = {"SUDO_UID": "65534", "SUDO_GID": "65534"}


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder that everybody may write; pytest's own are root's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def test_what_runs_in_a_lab_is_the_callers_of_sudo(everybodys):
    """The command, its files and groups, its home, and the log of the host that has failed."""
    say = "echo $(id -u) $(id -g) $(id -G) $HOME; grep -c host1 /etc/hosts; grep -E 'CapEff|SigIgn' /proc/self/status"
    command = f"{say}; echo $RANK > {everybodys}/file-$RANK; test $RANK = 0 || exit 7"
    done = lab("--hosts", "2", "--command", command, **NOBODY, TMPDIR=str(everybodys))
    assert done.returncode == 7, done.stderr
    home = pwd.getpwuid(65534).pw_dir
    uid, cap = f"65534 65534 65534 {home}", "CapEff:\t0000000000000000"
    ids, names, *status = done.stdout.splitlines()
    assert (ids, names) == (uid, "2") and cap in status
    assert int(next(line for line in status if line.startswith("SigIgn")).split()[1], 16) & 1 << signal.SIGPIPE - 1 == 0
    assert {(file.name, file.stat().st_uid, file.stat().st_gid) for file in everybodys.glob("file-*")} == {
        ("file-0", 65534, 65534),
        ("file-1", 65534, 65534),
    }
    (logs,) = everybodys.glob("accordion_bench-netlab-*")
    assert str(logs) in done.stderr
    assert {path.stat().st_uid for path in (logs, *logs.iterdir())} == {65534}


def test_a_caller_who_cannot_run_this_python_is_refused(everybodys, monkeypatch):
    """Neither the interpreter, nor the package: one sentence, before training."""
    mine = everybodys / "python"
    monkeypatch.setattr(sys, "executable", str(mine))
    for key, value in NOBODY.items():
        monkeypatch.setenv(key, value)
    for script, mode, why in (
        ("exit 0", 0o700, "Permission denied"),
        ("echo no module named accordion_bench >&2; exit 1", 0o755, "no module named accordion_bench"),
    ):
        mine.write_text(f"#!/bin/sh\n{script}\n")
        mine.chmod(mode)
        with pytest.raises(ConfigError, match=f"must be readable for nobody, who called sudo .*, got: {why}; "):
            job.run(hosts.Hosts(2), [sys.executable, "-m", "accordion_bench"])
    mine.write_text("#!/bin/sh\nexit 0\n")
    job.caller().refuse_unreadable()


def test_files_of_the_lab_lie_where_the_caller_may_write(everybodys, monkeypatch, tmp_path):
    for key, value in NOBODY.items():
        monkeypatch.setenv(key, value)
    before = os.geteuid(), os.getegid(), os.getgroups()
    caller = job.caller()
    with job.acting(caller):
        (everybodys / "theirs").write_text("x")
    assert (everybodys / "theirs").stat().st_uid == 65534
    with pytest.raises(ConfigError, match="netlab must write where nobody may, got"), job.acting(caller):
        (tmp_path / "not theirs").write_text("x")
    assert (os.geteuid(), os.getegid(), os.getgroups()) == before


def test_the_host_that_fails_first_is_heard_first():
    speak = "echo connection closed by peer >&2; exit 1"
    done = lab("--command", f"if [ $RANK = 2 ]; then sleep 0.1; echo mine; exit 7; fi; sleep 0.3; {speak}")
    assert done.returncode == 7
    assert done.stderr.index("host 2 failed with exit status 7") < done.stderr.index("mine")
    assert done.stderr.index("mine") < done.stderr.index("connection closed")


def test_a_configuration_that_is_refused_stays_one_sentence():
    done = lab("--hosts", "2", "--command", "if [ $RANK = 1 ]; then exit 2; fi; sleep 0.2; echo mend this >&2; exit 2")
    assert (done.returncode, done.stderr) == (2, "mend this\n")


def test_a_host_that_is_killed_is_the_one_that_failed_and_the_others_are_ended():
    done = lab("--command", "if [ $RANK = 1 ]; then kill -9 $$; fi; if [ $RANK = 0 ]; then exit 1; fi; sleep 1000")
    assert done.returncode == 137
    assert "host 1 failed with exit status 137 (SIGKILL)" in done.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize("signum, status", [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_everything_is_removed_after_a_signal(signum, status):
    command = [sys.executable, "-m", "accordion_bench.netlab", "--command", "echo here; sleep 1000 & wait"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "here\n"
    mine = f"ab-{running.pid}."
    namespaces = janitor.names(mine)
    assert len(namespaces) == 5
    inside = [pid for name in namespaces for pid in janitor._inhabitants(name)]
    assert len(inside) == 8
    running.send_signal(getattr(signal, signum))
    running.communicate(timeout=60)
    assert running.returncode == status
    wait_until(lambda: not janitor.names(mine))
    wait_until(lambda: not any(map(alive, inside)))


def alive(pid: int) -> bool:
    """Not gone, and more than a name that its parent has not read yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(true) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


MEETS = """
import os, pathlib, socket, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
with socket.create_server((os.environ["MASTER_ADDR"], 29501)):
    mine.touch()
    while not other.exists():
        time.sleep(0.05)
"""


def test_two_labs_at_once_have_their_ports_to_themselves(tmp_path):
    """Host 0 of each listens at the same address and port until the other one does, too."""
    files = [str(tmp_path / name) for name in ("one", "two")]
    only_first = "[ $RANK != 0 ] || exec"
    words = [f"{only_first} {shlex.join([sys.executable, '-c', MEETS, *order])}" for order in (files, files[::-1])]
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda typed: lab("--hosts", "2", "--command", typed, timeout=60), words):
            assert done.returncode == 0, done.stdout + done.stderr

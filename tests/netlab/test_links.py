"""What hosts really send over their links, and what becomes of them; needs root and network namespaces."""

import contextlib
import functools
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.netlab import calibrate, hosts, janitor, job, user
from accordion_bench.network import fit
from accordion_bench.network.collective_costs import KINDS
from accordion_bench.network.interface import Interface
from accordion_bench.network.link_options import to_type
from accordion_bench.network.measured_link import read_measured_link
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.sync.pair_exchange import PairExchange
from accordion_bench.sync.sparse_average import SparseAverage
from tests.kit import composed, inside
from tests.kit.helpers import exchange_for, yaml_names
from tests.kit.paths import ROOT
from tests.kit.processes import together

pytestmark = pytest.mark.netlab
Job = Callable[[str], tuple[subprocess.CompletedProcess, Path]]
LARGE = 256 * 1024  # bytes of a message, from which on counters and ledger agree as they are
AGREE = 0.03
SPECS = [TensorSpec("matrix", (65536, 32)), TensorSpec("bias", (512,))]
# so that messages of two million coordinates are large; what is not named here travels as its file says
OPTIONS = {
    "adacomp": {"bin_dense": 50},
    "demo": {"k": 128},
    "powersgd": {"rank": 4},
}
# of a model whose start-up broadcast takes as long as a step
ONE_STEP = [
    "model=resnet20",
    "dataset=synthetic",
    "dataset.train_size=8",
    "dataset.test_size=8",
    "batch_size=4",
    "epochs=1",
    "comm=gloo",
    "comm.interface=eth0",
    "comm.workers_per_process=1",
]
CALLS = ("all_reduce", "all_gather", "all_gather_uneven", "all_to_all", "all_reduce_max", "send_receive")
FILLED = 1448 / 1514  # of a full frame are data, as tbf counts it
CALIBRATED, SMALL = (1_000, 16_000, LARGE), 4_000  # bytes of a worker's message; from those follows what this one costs


@pytest.fixture(scope="module", autouse=True)
def allowed() -> Iterator[None]:
    """Skip with the sentence that the user would read; tests under sudo stay root's."""
    try:
        hosts.refuse()
    except ConfigError as refused:
        pytest.skip(str(refused))
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("SUDO_UID", raising=False)
        yield


# ---- in every host


class Noted(Ledger):
    """Notes the size of every message that is handed to a collective."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.messages: list[int] = []

    def _charge(self, kind: str, payload: int, wire: int, rounds: int) -> None:
        self.messages.append(payload // self.workers)
        super()._charge(kind, payload, wire, rounds)


@contextlib.contextmanager
def counted(comm: Comm, row: dict) -> Iterator[None]:
    """Fill a row with what the ledger and the interface count."""
    interface = Interface(hosts.INTERFACE)
    comm.ledger = ledger = Noted(comm.workers)
    dist.barrier()
    time.sleep(0.05)
    before = interface.sent()
    yield
    ended = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(ended, op=dist.ReduceOp.MAX)
    time.sleep(max(0.0, float(ended) + 0.06 - time.monotonic()))
    sent = torch.tensor([interface.sent() - before], dtype=torch.int64)
    dist.all_reduce(sent)
    wire, rounds = (ledger.columns()[key] for key in ("wire_bytes", "rounds"))
    largest = max(ledger.messages, default=0)
    row |= {"wire_bytes": wire, "rounds": rounds, "link_sent_bytes": int(sent) / comm.workers, "largest": largest}


def call(comm: Comm, name: str, nbytes: int) -> None:
    """One collective with about so many bytes of each worker."""
    if name == "all_reduce":
        comm.all_reduce_mean([torch.ones(1, nbytes // 4)])
    elif name == "all_gather":
        comm.all_gather(torch.ones(1, nbytes, dtype=torch.uint8))
    elif name == "all_gather_uneven":
        sizes = [nbytes * (worker + 1) // comm.workers for worker in range(comm.workers)]
        comm.all_gather_uneven([torch.ones(sizes[comm.rank], dtype=torch.uint8)], sizes)
    elif name == "all_to_all":
        comm.all_to_all([torch.ones(1, nbytes // comm.workers, dtype=torch.uint8)] * comm.workers)
    elif name == "send_receive":
        comm.send_receive(torch.ones(1, nbytes, dtype=torch.uint8), [worker ^ 1 for worker in range(comm.workers)])
    else:
        comm.all_reduce_max(list(torch.ones(nbytes // 4)))


def measure(host: int, entrances: list[inside.Entrance], file: Path) -> None:
    """Every compressor's exchange and every collective; host 0 writes the rows."""
    inside.enter(entrances[host])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = Comm(1, dist.get_world_size(), dist.get_rank())
    rows: list[dict] = []
    for name in CALLS:
        for size in (*CALIBRATED, SMALL):
            rows.append({"what": name, "size": size})
            with counted(comm, rows[-1]):
                for _ in range(2 if size == LARGE else 20):
                    call(comm, name, size)
    g = torch.Generator().manual_seed(comm.rank)
    xs_W = [torch.randn(1, *spec.shape, generator=g) for spec in SPECS]
    for name in yaml_names("compressor"):
        exchange, plan = exchange_for(name, specs=SPECS, dtype=torch.float32, comm=comm, **OPTIONS.get(name, {}))
        rows.append({"what": f"compressor={name}"})
        with counted(comm, rows[-1]):
            exchange(xs_W, StepInfo(plan, exchange.start_step, 0.1))
    schemes = {"sparta": SparseAverage(0.1, SPECS, comm, xs_W[0]), "noloco": PairExchange(SPECS, comm, xs_W[0])}
    for name, exchange in schemes.items():
        rows.append({"what": f"sync={name}"})
        with counted(comm, rows[-1]):
            exchange(xs_W, StepInfo(plan, 0, 0.1))
    if comm.leader:
        file.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# ---- bytes


@pytest.fixture(scope="module")
def rows(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int | None], dict]:
    """Four hosts for all of them."""
    file = tmp_path_factory.mktemp("netlab") / "rows.json"
    with hosts.Hosts(4) as four:
        together(4, measure, inside.entrances(four), file)
    return {(row["what"], row.get("size")): row for row in json.loads(file.read_text())}


def ratio(row: dict) -> float:
    return row["link_sent_bytes"] / row["wire_bytes"]


@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_interfaces_and_ledger_agree_for_every_compressor(rows, name):
    row = rows[f"compressor={name}", None]
    assert row["largest"] >= LARGE
    assert abs(ratio(row) - 1) < AGREE, row


@pytest.mark.parametrize("name", ["sparta", "noloco"])
def test_interfaces_and_ledger_agree_for_schemes_with_exchanges_of_their_own(rows, name):
    row = rows[f"sync={name}", None]
    assert row["largest"] >= LARGE
    assert abs(ratio(row) - 1) < AGREE, row


@pytest.mark.parametrize("name", CALLS)
def test_interfaces_and_ledger_agree_for_every_collective(rows, name):
    row = rows[name, LARGE]
    assert abs(ratio(row) - 1) < AGREE, row


@pytest.mark.parametrize("name", CALLS)
def test_small_messages_agree_after_their_calibrated_cost(rows, name):
    cost = fit.overhead([rows[name, size] for size in CALIBRATED])
    row = rows[name, SMALL]
    after = row["link_sent_bytes"] / cost.counted(row)
    print(f"{name}: {cost.message:.0f} bytes a round; {ratio(row):.3f} before, {after:.3f} after")
    assert abs(after - 1) < AGREE


# ---- links and jobs


def lab(*words: str, timeout: float = 300, **environ: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "accordion_bench.netlab", *words]
    with tempfile.TemporaryDirectory() as logs:  # those of failures are kept
        env = {**os.environ, "TMPDIR": logs, **environ}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def test_both_ends_of_a_link_are_limited_and_a_slow_host_more():
    with hosts.Hosts(3, 1e8, {2: 2e7}) as three:
        for host, shown in enumerate(["100Mbit", "100Mbit", "20Mbit"]):
            near = ["tc", "-n", three.namespace(host), "qdisc", "show", "dev", hosts.INTERFACE]
            far = ["tc", "-n", three._switch, "qdisc", "show", "dev", f"host{host}"]
            for command in (near, far):
                assert f"rate {shown} " in subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_a_probe_writes_what_each_kind_of_collective_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "SECONDS", 0.5)
    with hosts.Hosts(2, 1e8) as two:
        assert calibrate.probe(two, tmp_path) == 0
    link = read_measured_link(tmp_path / "link.json")
    assert set(link.kinds) == set(KINDS) and min(cost.bandwidth for cost in link.kinds.values()) > 0
    assert to_type(link) in capsys.readouterr().out


@pytest.mark.slow
def test_a_probe_finds_the_rate_that_a_link_is_limited_to(tmp_path, monkeypatch):
    """All-reduces fill it but for headers; other kinds do not, and have rates of their own. Wants a quiet machine."""
    monkeypatch.setattr(calibrate, "SECONDS", 3.0)
    with hosts.Hosts(2, 1e8) as two:
        assert calibrate.probe(two, tmp_path) == 0
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
    user.caller().refuse_unreadable()


def test_files_of_the_lab_lie_where_the_caller_may_write(everybodys, monkeypatch, tmp_path):
    for key, value in NOBODY.items():
        monkeypatch.setenv(key, value)
    before = os.geteuid(), os.getegid(), os.getgroups()
    caller = user.caller()
    with user.acting(caller):
        (everybodys / "theirs").write_text("x")
    assert (everybodys / "theirs").stat().st_uid == 65534
    with pytest.raises(ConfigError, match="netlab must write where nobody may, got"), user.acting(caller):
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


# ---- real runs


@pytest.fixture(scope="module")
def ended(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Of a job's name, how it has ended, and the folder of its runs."""
    run = "-m accordion_bench comm=gloo comm.interface=eth0 comm.workers_per_process=1 tracker=none"
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes=$WORLD_SIZE --nproc_per_node=1"
    static = "--node_rank=$RANK --master_addr=$MASTER_ADDR --master_port=29501"
    elastic = "--rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:29501 --local_addr=$HOST_ADDR"
    elastic += " --rdzv_conf=is_host=$([ $RANK = 0 ] && echo 1 || echo 0)"
    two = ["--hosts", "2", "--rate"]
    words = {
        "static": [*two, "100mbit", "--cut", "1:1s@0.2s", "--command", f"{torchrun} {static} {run} epochs=3"],
        "elastic": [*two, "none", "--command", f"{torchrun} {elastic} {run} epochs=1"],
        "long cut": [*two, "100mbit", "--cut", "1:200s@0.3s", "--", "comm.timeout=8", "epochs=200"],
    }

    @functools.cache
    def end(name: str) -> tuple[subprocess.CompletedProcess, Path]:
        folder = tmp_path_factory.mktemp("runs")
        *options, last = words[name]
        paths = f"paths.runs={folder}"
        return lab(*options, *([last, paths] if "--" in options else [f"{last} {paths}"])), folder

    return end


def summary(folder: Path) -> dict:
    (file,) = folder.glob("*/summary.json")
    return json.loads(file.read_text())


@pytest.mark.sample(2)
@pytest.mark.parametrize("rendezvous", ["static", "elastic"])
def test_torchrun_meets_across_hosts(ended, rendezvous):
    done, folder = ended(rendezvous)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(folder)["steps"] > 0


@pytest.mark.slow
def test_a_run_records_what_its_link_has_carried(ended):
    _, folder = ended("elastic")
    found = summary(folder)
    on_links = found["wire_bytes"] + found["control_wire_bytes"]
    assert abs(found["link_sent_bytes"] / on_links - 1) < AGREE, (found["link_sent_bytes"], on_links)


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


def train_inside(host: int, entrances: list[inside.Entrance], cfg: dict) -> None:
    inside.enter(entrances[host])
    train.run(cfg)


def test_what_is_sent_before_the_first_step_is_not_counted(tmp_path):
    cfg = composed.cfg(*ONE_STEP, f"paths.runs={tmp_path}")
    with hosts.Hosts(2, 1e8) as two:
        together(2, train_inside, inside.entrances(two), cfg)
    found = summary(tmp_path)
    assert found["steps"] == 1
    on_links = found["wire_bytes"] + found["control_wire_bytes"]
    assert abs(found["link_sent_bytes"] / on_links - 1) < AGREE, (found["link_sent_bytes"], on_links)


WHOLE = ["sync=diloco", "sync.period=8"]
STREAMED = ["sync=streaming_diloco", "sync.period=8", "sync.delay=3"]


@pytest.mark.slow
def test_fragments_travel_behind_the_next_steps(tmp_path):
    """At the same rate: as many bytes on the link as DiLoCo sends, and less of their time is waited for."""
    long = ["dataset.train_size=1024", "batch_size=32", "sync.final=false"]  # 16 steps
    found = {}
    for name, scheme in {"whole": WHOLE, "streamed": STREAMED}.items():
        cfg = composed.cfg(*ONE_STEP, *scheme, *long, f"paths.runs={tmp_path / name}")
        with hosts.Hosts(2, 3e7) as two:
            together(2, train_inside, inside.entrances(two), cfg)
        found[name] = summary(tmp_path / name)
        on_links = found[name]["wire_bytes"] + found[name]["control_wire_bytes"]
        assert abs(found[name]["link_sent_bytes"] / on_links - 1) < AGREE, (
            name,
            found[name]["link_sent_bytes"],
            on_links,
        )
    whole, streamed = found["whole"], found["streamed"]
    print({name: (one["exposed_seconds"], one["comm_seconds"]) for name, one in found.items()})
    assert whole["steps"] == streamed["steps"] == 16 and whole["payload_bytes"] == streamed["payload_bytes"]
    assert streamed["exposed_seconds"] < 0.6 * whole["exposed_seconds"]


def test_a_link_that_is_cut_for_less_than_the_timeout_is_waited_for(ended):
    done, folder = ended("static")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.index("link of host 1 is down") < done.stderr.index("link of host 1 is up again")
    assert summary(folder)["epochs"] == 3


@pytest.mark.slow
def test_a_link_that_is_cut_for_longer_ends_the_run(ended):
    done, folder = ended("long cut")
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    assert "link of host 1 is down" in done.stderr
    assert "is up again" not in done.stderr
    assert not list(folder.glob("*/done"))

"""What is typed about links, what is refused, and the lines that are fitted; needs no root."""

import os
import platform
import pwd
import shutil

import pytest

from accordion_bench.netlab import __main__ as command_line
from accordion_bench.netlab import hosts, janitor, job, options
from accordion_bench.netlab.options import Cut
from accordion_bench.network import fit
from accordion_bench.network.meter import Interface
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import conf_dir
from tests.kit.probe_rows import made


@pytest.mark.parametrize(
    "text, rate", [("100mbit", 1e8), ("64kbit", 64e3), ("2.5gbit", 2.5e9), ("none", None), ("0.5mbit", 5e5)]
)
def test_rates(text, rate):
    assert options.rate(text) == rate


@pytest.mark.parametrize(
    "text, cut",
    [
        ("2:5s", Cut(2, 5.0)),
        ("0:500ms@10s", Cut(0, 0.5, 10.0)),
        ("3:5@2", Cut(3, 5.0, 2.0)),
        ("1:5s@0", Cut(1, 5.0, 0.0)),
    ],
)
def test_cuts(text, cut):
    assert options.cut(text, 4) == cut


def test_slow_hosts_and_delays():
    assert options.slow_host("2:20mbit", 4) == (2, 2e7)
    assert options.slow_host("0:none", 4) == (0, None)
    assert options.delay("5ms") == 0.005
    assert options.delay("1s") == 1.0


# what is typed, and what the sentence says to type instead
REFUSED = [
    (["--rate", "fast"], "--rate=100mbit"),
    (["--rate", "100Mbps"], "--rate=100mbit"),
    (["--rate", "10G"], "--rate=10gbit"),
    (["--rate", "0mbit"], "--rate=100mbit"),
    (["--hosts", "1"], "--hosts=4"),
    (["--hosts", "many"], "--hosts=4"),
    (["--hosts", "1000"], "--hosts=4"),
    (["--slow-host", "4:20mbit"], "--slow-host=3:20mbit"),
    (["--slow-host", "20mbit"], "--slow-host=3:20mbit"),
    (["--slow-host", "2:20Mbit/s"], "--slow-host=2:20mbit"),
    (["--cut", "2"], "--cut=3:5s@10s"),
    (["--cut", "9:5s"], "--cut=3:5s"),
    (["--delay", "5"], "--delay=5ms"),
    (["--workers-per-host", "0"], "--workers-per-host=1"),
    (["--command", "true", "--", "epochs=1"], "inside --command"),
    (["--probe", "--", "epochs=1"], "--probe alone"),
]


@pytest.mark.parametrize("typed, instead", REFUSED, ids=[" ".join(typed) for typed, _ in REFUSED])
def test_each_refusal_is_one_sentence_that_says_what_to_type(typed, instead, capsys):
    assert command_line.main(typed) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.rstrip().endswith(instead) or instead in said.partition("; type ")[2]


@pytest.mark.parametrize("text", ["100mbit", "10gbit", "64kbit"])
def test_what_is_suggested_is_accepted(text):
    for typo in (text.replace("bit", "Bit"), text.replace("bit", "bps"), text.replace("bit", "")):
        with pytest.raises(ValueRefused) as refused:
            options.rate(typo)
        assert options.rate(refused.value.instead) == options.rate(text)


def test_machines_without_hosts_are_offered_the_modelled_link(monkeypatch):
    said = {}
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for why, patch in {
        "Linux": (platform, "system", lambda: "Darwin"),
        "apt install iproute2": (shutil, "which", lambda tool: None),
        "root": (os, "geteuid", lambda: 1000),
        "not permitted": (hosts, "_called", lambda *command: "mount --make-shared /run/netns failed: not permitted"),
    }.items():
        with monkeypatch.context() as patched:
            patched.setattr(*patch)
            with pytest.raises(ConfigError) as refused:
                hosts.refuse(1e8)
        said[why] = str(refused.value)
    for why, sentence in said.items():
        assert why in sentence
        assert sentence.endswith("python -m accordion_bench network=100mbit")


def test_the_modelled_link_of_a_rate():
    assert options.modelled(1e9) == "network=1gbit"
    assert options.modelled(2e7) == "network=custom network.bandwidth=20mbit"
    assert options.modelled(1e8, 0.005) == "network=custom network.bandwidth=100mbit network.latency=0.005"
    names = {name.stem for name in (conf_dir() / "network").glob("*.yaml")}
    assert {*options.presets(), "custom"} <= names


def job_of(*typed: str) -> list[str]:
    return command_line.job_of(command_line.parser().parse_args(list(typed)))


def test_the_command_of_every_host():
    overrides = job_of("--", "compressor=topk")[3:]
    assert overrides == ["comm=gloo", "comm.interface=eth0", "comm.workers_per_process=1", "compressor=topk"]
    assert job_of("--workers-per-host", "2", "--")[-1] == "comm.workers_per_process=2"
    assert job_of("--", "workers=8", "comm=auto")[3:] == ["comm.interface=eth0", "workers=8", "comm=auto"]
    assert job_of("--command", "echo $RANK") == ["sh", "-c", "echo $RANK"]


def test_hosts_tell_a_launchers_variables():
    four = hosts.Hosts(4)
    told = [four.environment(host) for host in range(4)]
    assert [env["RANK"] for env in told] == list("0123")
    assert len({env["HOST_ADDR"] for env in told}) == 4
    assert {env["MASTER_ADDR"] for env in told} == {told[0]["HOST_ADDR"]}
    assert all(int(env["OMP_NUM_THREADS"]) >= 1 for env in told)


def test_a_burst_is_a_hundredth_of_a_second_but_lets_a_packet_of_tcp_pass_whole():
    assert hosts.burst_bytes(1e9) == 1_250_000
    frames = -(-65_536 // 1448)
    assert hosts.burst_bytes(1e6) > 65_536 + frames * 66


def test_a_lab_is_known_by_its_lock(tmp_path, monkeypatch):
    """Held, it is left alone; free, it is cleared up; a file that is none of ours stays."""
    monkeypatch.setattr(janitor, "LOCKS", tmp_path / "locks")
    removed = []
    monkeypatch.setattr(janitor, "names", lambda prefix: [f"{prefix}0"])
    monkeypatch.setattr(janitor, "remove", removed.extend)
    janitor.remove_orphans()
    alive, gone = janitor.new_lab(), janitor.new_lab()
    held = janitor.hold(alive)
    janitor.hold(gone).release()
    (tmp_path / "locks" / "ab-other.lock").touch()
    janitor.remove_orphans()
    assert removed == [f"{gone}-0"]
    assert sorted(file.name for file in (tmp_path / "locks").iterdir()) == [f"{alive}.lock", "ab-other.lock"]
    held.release()


def caller_of(monkeypatch, **environ: str) -> job.User | None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for key in ("SUDO_UID", "SUDO_GID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    return job.caller()


def test_who_called_sudo(monkeypatch):
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {7: me}[uid])
    found = caller_of(monkeypatch, SUDO_UID="7", SUDO_GID=str(me.pw_gid))
    assert found is not None and (found.uid, found.gid) == (7, me.pw_gid)
    assert found.groups == tuple(os.getgrouplist(me.pw_name, me.pw_gid))
    assert found.environment() == {"HOME": me.pw_dir, "USER": me.pw_name, "LOGNAME": me.pw_name}
    stranger = caller_of(monkeypatch, SUDO_UID="4000", SUDO_GID="4001")
    assert stranger == job.User(4000, 4001, (4001,), "4000", "/")


def test_root_calls_nobody(monkeypatch):
    assert caller_of(monkeypatch) is None
    assert caller_of(monkeypatch, SUDO_UID="0", SUDO_GID="0") is None
    monkeypatch.setenv("SUDO_UID", "7")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert job.caller() is None


@pytest.mark.parametrize("text", ["", "me", "-1", "1.5", "²", str(2**32 - 1)])
def test_a_caller_without_a_number_is_refused(monkeypatch, text):
    with pytest.raises(ConfigError, match="SUDO_UID must be a number, as sudo sets it, got"):
        caller_of(monkeypatch, SUDO_UID=text, SUDO_GID="1")


@pytest.mark.parametrize(
    "line", ["Connection closed by peer [10.77.0.2]:36569", "Read error: Connection reset by peer", "Timed out waiting"]
)
def test_words_of_those_who_lost_another(line):
    assert job.LOST_PEER.search(line)
    assert not job.LOST_PEER.search("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_the_probe_says_what_to_type():
    rows = made(2e-3, 8e-8)
    found = fit.summary(rows, with_burst=False)
    assert command_line.to_type(found) == "network=custom network.bandwidth=100mbit network.latency=0.002"
    text = "\n".join(command_line.table(rows, found))
    assert "alpha = 2.000 ms" in text
    assert "(100.0 Mbit/s)" in text
    assert "800 bytes a round" in text


# ---- counters


def test_an_interface_counts(tmp_path):
    for name, sent, received in (("eth0", 5, 7), ("lo", 1, 1)):
        folder = tmp_path / name / "statistics"
        folder.mkdir(parents=True)
        (folder / "tx_bytes").write_text(f"{sent}\n")
        (folder / "rx_bytes").write_text(f"{received}\n")
    (tmp_path / "bonding_masters").write_text("")  # no interface, though it is listed there
    found = Interface("eth0", tmp_path)
    assert (found.sent(), found.received()) == (5, 7)
    with pytest.raises(ValueRefused) as refused:
        Interface("eth1", tmp_path)
    assert "comm.interface must be null or an interface of this machine (eth0, lo), got eth1" in str(refused.value)
    assert str(refused.value).endswith("; type comm.interface=eth0")
    with pytest.raises(ValueRefused, match=r"type comm\.interface=null"):
        Interface("eth0", tmp_path / "absent")


def test_a_link_is_up_again_when_the_last_of_its_cuts_is_over(tmp_path):
    """Cuts of one host may overlap; the end of the shorter one does not join the link."""

    class Links:
        def __init__(self):
            self.down = set()

        cut = property(lambda self: self.down.add)
        join = property(lambda self: self.down.discard)

    links, long, short = Links(), Cut(2, 10.0, 5.0), Cut(2, 3.0, 7.0)
    running = job._Job(links, [], {}, [long, short], tmp_path, [], None)
    running.cuts = {long: 5.0, short: 7.0}  # when they begin
    for now, down in ((6.0, {2}), (8.0, {2}), (11.0, {2}), (16.0, set())):
        running._cut(now)
        running._cut(now)
        assert links.down == down

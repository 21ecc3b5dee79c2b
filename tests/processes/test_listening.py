"""Who can be reached from where: the store at its address, gloo at the loopback where all processes are here."""

import multiprocessing
import os
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from accordion_bench.comm.sealed_store import SECRET, SealedStore
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes import listening, process_group, rendezvous, spawn
from accordion_bench.processes.placement import Placement
from tests.kit.processes import free_port

ANYWHERE = "0.0.0.0"


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    monkeypatch.setattr(rendezvous, "_stores", {})
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_USE_AGENT_STORE", SECRET):
        monkeypatch.delenv(name, raising=False)


def own_listeners() -> set[tuple[str, int]]:
    """(address, port) of the sockets at which this process listens."""
    own = {link for entry in Path("/proc/self/fd").iterdir() if (link := _target(entry)).startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                number, port = fields[1].split(":")
                found.add((_address(number), int(port, 16)))
    return found


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""


def _address(number: str) -> str:
    words = b"".join(bytes.fromhex(number[at : at + 8])[::-1] for at in range(0, len(number), 8))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


linux = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's tables")


@linux
def test_the_store_listens_at_the_given_address_only():
    """torch's own would at all addresses of the machine. Whoever is let in speaks with it as ever."""
    before, port = own_listeners(), free_port()
    store = rendezvous._connect("127.0.0.1", str(port), 0, 1, 5.0)
    assert own_listeners() - before == {("127.0.0.1", port)}
    store.set("x", "1")
    other = dist.TCPStore("127.0.0.1", port, None, False)
    assert SealedStore(other, 1).under("job--").read("x", str) is None  # under another launch
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=2)  # another address of this machine


@linux
def test_gloo_listens_at_the_loopback_only_where_all_processes_are_here(tmp_path, monkeypatch):
    """Also where schemes make groups later; gloo's own choice would be the address of the machine's name."""
    for name in ("GLOO_SOCKET_IFNAME", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    store, before = SealedStore(dist.FileStore(str(tmp_path / "store"), 1), 1), own_listeners()
    with process_group.use_settings(None):
        assert os.environ["GLOO_SOCKET_IFNAME"] == process_group.loopback()
        process_group.join(Placement("gloo", 1, 1), store, 30.0)
        try:
            dist.new_group([0])
            new = {address for address, _ in own_listeners() - before}
        finally:
            process_group.leave()
    assert new and all(address.removeprefix("::ffff:").startswith("127.") for address in new), new


class Unborn:
    """A process that is not started; looks at the folder where it would meet the others."""

    pid, exitcode = None, 0
    modes: list[int] = []

    def __init__(self, target, args, **options) -> None:
        self.folder = Path(args[2].file).parent

    def start(self) -> None:
        self.modes.append(stat.S_IMODE(self.folder.stat().st_mode))

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float) -> None: ...


def test_spawned_processes_meet_in_a_folder_of_their_own(monkeypatch):
    """Nobody else may enter it, whatever new files are usually allowed: the file in it is their store."""
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Unborn)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    before = os.umask(0)
    try:
        ended = spawn.spawn(lambda where, watch: None, Placement("gloo", 2, 1), 5.0, None)
    finally:
        os.umask(before)
    assert ended.error() is None and Unborn.modes == [0o700, 0o700]


# ---- what the address means here


def at(monkeypatch, *addresses: str) -> None:
    """The name of the machine leads to these."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(listening.socket, "getaddrinfo", lambda *args, **options: found)


def bound(address: str, sealed: bool = False) -> str:
    with listening.listen(address, 0, sealed) as listener:
        return listener.getsockname()[0]


def test_a_number_is_taken_at_its_word(capsys):
    assert bound("127.0.0.1") == "127.0.0.1"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "addresses, why",
    [
        (["127.0.1.1"], "machine0 leads back to itself there, which other machines could not follow"),  # Debian's hosts
        (["203.0.113.7"], "machine0 is no address that it has"),  # translated on the way
        ([], "machine0 is no address that it has"),
    ],
)
def test_a_name_that_others_understand_in_another_way(addresses, why, monkeypatch, capsys):
    """With a secret rank 0 listens at all addresses, and says so; without one it does only by its machine's own name,
    since it may be mistyped."""
    at(monkeypatch, *addresses)
    assert bound("machine0", sealed=True) in ("::", ANYWHERE)
    said = f"warning: rank 0 listens at all addresses of its machine, because {why}; type export MASTER_ADDR=ITS_NUMBER"
    assert capsys.readouterr().err == f"{said}\n"
    with pytest.raises(ConfigError, match=f"MASTER_ADDR must be an address of rank 0's machine, got machine0: {why}; "):
        bound("machine0")
    monkeypatch.setattr(listening.socket, "gethostname", lambda: "Machine0")
    if addresses == ["127.0.1.1"]:
        assert bound("machine0") in ("::", ANYWHERE) and capsys.readouterr().err == f"{said}\n"
    else:
        with pytest.raises(ConfigError, match="MASTER_ADDR must be"):
            bound("machine0")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("address", ["localhost", "203.0.113.7", "no.such.name.invalid"])
def test_a_mistyped_address_opens_nothing(address, capsys):
    """`localhost` is right where all processes are here; then rank 0 is asked for the loopback's number."""
    with pytest.raises(ConfigError, match=f"MASTER_ADDR must be an address of rank 0's machine, got {address}: "):
        bound(address)
    assert capsys.readouterr().err == ""


def test_a_port_below_1024(monkeypatch):
    def refused(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(listening.socket, "create_server", refused)
    with pytest.raises(ConfigError, match=r"MASTER_PORT must be a port at which .* got 80 \(Permission denied\); type"):
        listening.listen("127.0.0.1", 80)


def test_descriptors_are_raised_to_what_is_allowed(monkeypatch):
    import resource

    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 524288))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    listening.raise_descriptor_limit()
    assert limits == [(524288, 524288)]

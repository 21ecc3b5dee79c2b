"""Job: run one command in all hosts, collect their output, find the host that failed first and end the others."""

import contextlib
import os
import pwd
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

from accordion_bench.netlab.options import Cut
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.processes.interrupt import handling

LAUNCHER = Path(__file__).with_name("become.py")
LATE = 1.0  # delay of host 0's output in seconds, so that the host that fails first is reported first
GRACE = 3.0  # seconds for the others to report their errors after the first failure
SAVING = 60.0  # seconds for a job to save its state after Ctrl-C
TAIL = 40  # lines
FIRST_BYTES = 100_000  # sent by a host: rendezvous has ended, and gradients or parameters are being sent
NAMED = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')  # `ip netns exec` has a separate mount namespace
REFUSED = 2  # exit status after a one-sentence error that the user can correct
KILLED = 129  # smallest exit status of a process ended by a signal
# error messages of processes that only observe the loss of another one
LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed? ?out|connection (refused|closed)", re.IGNORECASE
)


@dataclass(frozen=True)
class User:
    """User other than root: numbers of user and groups, name and home directory."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str

    def environment(self) -> dict[str, str]:
        """Return the variables that a login sets."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def command(self) -> list[str]:
        """Return the prefix that makes a command of root run as this user."""
        groups = ",".join(map(str, self.groups))
        return [sys.executable, "-I", str(LAUNCHER), str(self.uid), str(self.gid), groups]

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Context with this user's file permissions and ownership. No other threads may run in it."""
        gid, groups = os.getegid(), os.getgroups()
        os.setgroups(self.groups)
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(gid)
            os.setgroups(groups)

    def refuse_unreadable(self) -> None:
        """Raise ConfigError if the user cannot run this Python or read this package."""
        try:
            tried = subprocess.run(
                [sys.executable, "-c", "import accordion_bench.options.conf_dir"],
                env={**os.environ, **self.environment()},
                user=self.uid,
                group=self.gid,
                extra_groups=self.groups,
                capture_output=True,
                text=True,
            )
            said = tried.stderr.strip().splitlines()[-1:] or [f"exit status {tried.returncode}"]
            why = said[0] if tried.returncode else ""
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise ConfigError(
                f"{sys.executable} and accordion_bench must be readable for {self.name}, who called sudo and whom "
                f"training belongs to, got: {why}; install where that user can read, or, to train as root, type "
                "sudo env -u SUDO_UID and the same command"
            )


def caller() -> User | None:
    """Return the user who called sudo, whose number SUDO_UID must be; None without sudo or if root called it."""
    if os.geteuid() != 0 or "SUDO_UID" not in os.environ:
        return None
    uid, gid = (_number(key) for key in ("SUDO_UID", "SUDO_GID"))
    if uid == 0:
        return None
    try:
        known = pwd.getpwuid(uid)
    except KeyError:  # users without an account entry are allowed
        return User(uid, gid, (gid,), str(uid), "/")
    return User(uid, gid, tuple(os.getgrouplist(known.pw_name, gid)), known.pw_name, known.pw_dir)


@contextlib.contextmanager
def acting(user: User | None) -> Iterator[None]:
    """Context with the file permissions of a user (None = root), in which PermissionError becomes ConfigError."""
    try:
        with user.acting() if user else contextlib.nullcontext():
            yield
    except PermissionError as error:
        whose = user.name if user else "root"
        raise ConfigError(
            f"netlab must write where {whose} may, got {error.filename}; type another --out or TMPDIR=/tmp"
        ) from error


def _number(key: str) -> int:
    text = os.environ.get(key, "")
    if not text.isascii() or not text.isdigit() or int(text) >= 2**32 - 1:
        raise ValueRefused(key, "a number, as sudo sets it", text or "nothing", 1000)
    return int(text)


class Lab(Protocol):
    """Interface of the hosts of a job, numbered from 0; implemented by `hosts.Hosts`."""

    number: int

    @property
    def interface(self) -> str: ...

    def namespace(self, host: int) -> str: ...

    def address(self, host: int) -> str: ...

    def environment(self, host: int) -> dict[str, str]: ...

    def counters(self) -> list[tuple[int, int]]: ...

    def cut(self, host: int) -> None: ...

    def join(self, host: int) -> None: ...


@dataclass(frozen=True)
class JobOutcome:
    """Result of a job.

    Args:
        status: 0, or exit status of the host that failed first; 128 + signal for a job ended by a signal.
        failed: number of that host; None = none failed.
        seconds: time from the first start to the last end.
        sent, received: bytes over each host's link.
        logs: folder with each host's output; a temporary one is deleted unless a host failed.
    """

    status: int
    failed: int | None
    seconds: float
    sent: list[int]
    received: list[int]
    logs: Path


def run(
    hosts: Lab,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    cuts: Sequence[Cut] = (),
    logs: Path | None = None,
) -> JobOutcome:
    """Run `argv` in all hosts, with the output of host 0 on this terminal and that of all hosts in files.

    If a host fails, the others have `GRACE` seconds to report errors and are then killed. The end of the output of the
    host that failed first is printed before host 0's later output. Ctrl-C and SIGTERM are forwarded; a second signal
    ends the job immediately. Under sudo the command runs as the user who called sudo, who also owns the logs.

    Raises:
        ConfigError: that user cannot run this Python.
    """
    user = caller()
    if user and argv[0] == sys.executable:
        user.refuse_unreadable()
    folder = _folder(logs, user)
    before = hosts.counters()
    begin = time.monotonic()
    received: list[int] = []
    job = _Job(hosts, argv, env or {}, cuts, folder, received, user)
    with handling(lambda signum, frame: received.append(signum)), job as running:
        running.watch()
    seconds = time.monotonic() - begin
    status, failed = running.conclude()
    if logs is None and (failed is None or status == REFUSED):
        shutil.rmtree(folder)
    spent = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(hosts.counters(), before, strict=True)]
    return JobOutcome(status, failed, seconds, [sent for sent, _ in spent], [got for _, got in spent], folder)


def _folder(logs: Path | None, user: User | None) -> Path:
    with acting(user):
        if logs is None:
            return Path(tempfile.mkdtemp(prefix="accordion_bench-netlab-"))
        logs.mkdir(parents=True, exist_ok=True)
        return logs


class _Job:
    def __init__(
        self,
        hosts: Lab,
        argv: Sequence[str],
        env: Mapping[str, str],
        cuts: Sequence[Cut],
        folder: Path,
        signals: list[int],
        user: User | None,
    ) -> None:
        self.hosts, self.argv, self.env, self.folder, self.signals = hosts, list(argv), env, folder, signals
        self.user = user
        self.children: list[subprocess.Popen] = []
        self.failures: dict[int, tuple[float, int]] = {}  # (time, exit status), without hosts that this process killed
        self.ended = False  # whether this process killed the hosts
        self.cuts = {cut: float("inf") for cut in cuts}  # start times
        self.down: dict[Cut, float] = {}  # end times
        self.held: deque[tuple[float, TextIO, bytes]] = deque()
        self.names = folder / "hosts"  # /etc/hosts of the hosts, which have no name server
        self.heard = 0  # number of forwarded signals
        self.selector = selectors.DefaultSelector()
        self.files = contextlib.ExitStack()

    def __enter__(self) -> "_Job":
        names = [
            f"{kind}{self.hosts.address(host)} host{host}\n"
            for host in range(self.hosts.number)
            for kind in ("", "::ffff:")
        ]
        local = Path("/etc/hosts")
        known = local.read_text(encoding="utf-8") if local.exists() else ""
        with acting(self.user):
            self.names.write_text(known + "".join(names), encoding="utf-8")
            self.names.chmod(0o644)  # readable as /etc/hosts, independent of the umask
            logs = [self.files.enter_context(self._log(host).open("wb")) for host in range(self.hosts.number)]
        self.log = logs[0]
        try:
            for host, log in enumerate(logs):
                self.children.append(self._start(host, log))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        for child in self.children:
            child.wait()
        for cut in self.down:
            self.hosts.join(cut.host)
        self.selector.close()
        self.files.close()

    def _start(self, host: int, log: BinaryIO) -> subprocess.Popen:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self.hosts.environment(host)}
        env |= {**(self.user.environment() if self.user else {}), **self.env}
        output: Any = subprocess.PIPE if host == 0 else log
        become = self.user.command() if self.user else []
        child = subprocess.Popen(
            ["ip", "netns", "exec", self.hosts.namespace(host), *NAMED, str(self.names), *become, *self.argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE if host == 0 else subprocess.STDOUT,
            start_new_session=True,
        )
        if host == 0:
            for pipe, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                assert pipe is not None
                self.files.enter_context(pipe)
                self.selector.register(pipe, selectors.EVENT_READ, target)
        end = os.pidfd_open(child.pid)
        self.files.callback(os.close, end)
        self.selector.register(end, selectors.EVENT_READ, child)
        return child

    def _log(self, host: int) -> Path:
        return self.folder / f"host-{host}.log"

    def watch(self) -> None:
        """Handle output, exits, cuts and signals until all hosts have ended."""
        last = float("inf")  # end time of the last host
        while self.selector.get_map() and time.monotonic() < last + 1:  # a grandchild may keep the pipes open
            self._listen()
            now = time.monotonic()
            if last == float("inf") and all(child.poll() is not None for child in self.children):
                last = now
            while self.held and not self.failures and self.held[0][0] + LATE < now:
                self._say_held()
            self._cut(now)
            self._pass_on(now)
            first = min((when for when, _ in self.failures.values()), default=now)
            if now > first + GRACE:
                self._end()

    def _listen(self) -> None:
        """Handle output and exits of the hosts, waiting up to 0.1 s."""
        for key, _ in self.selector.select(timeout=0.1):
            if isinstance(key.data, subprocess.Popen):
                status = key.data.wait()
                self.selector.unregister(key.fd)
                if status and not self.ended:
                    host = self.children.index(key.data)
                    self.failures[host] = time.monotonic(), status if status > 0 else 128 - status
            elif said := os.read(key.fd, 1 << 16):
                self.log.write(said)
                self.log.flush()
                self.held.append((time.monotonic(), key.data, said))
            else:
                self.selector.unregister(key.fileobj)

    def _say_held(self) -> None:
        _, target, said = self.held.popleft()
        target.write(said.decode(errors="replace"))
        target.flush()

    def _cut(self, now: float) -> None:
        for cut, begin in list(self.cuts.items()):
            if begin == float("inf") and _sent(self.children[cut.host].pid, self.hosts.interface) > FIRST_BYTES:
                self.cuts[cut] = now + cut.at
            elif begin <= now:
                print(f"netlab: the link of host {cut.host} is down for {cut.seconds:g} s", file=sys.stderr)
                self.hosts.cut(cut.host)
                self.down[cut] = now + cut.seconds
                del self.cuts[cut]
        for cut, end in list(self.down.items()):
            if end <= now:
                del self.down[cut]
                if all(other.host != cut.host for other in self.down):
                    self.hosts.join(cut.host)
                    print(f"netlab: the link of host {cut.host} is up again", file=sys.stderr)

    def _pass_on(self, now: float) -> None:
        """Forward a first signal, and kill the job after a second one or after `SAVING` seconds."""
        if len(self.signals) > self.heard:
            first, self.heard = self.heard == 0, len(self.signals)
            if first:
                self.stop_by = now + SAVING
                self._signal(self.signals[0])
            else:
                self._end()
        if self.heard and now > self.stop_by:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signum)

    def conclude(self) -> tuple[int, int | None]:
        """Print the delayed output and the failures, and return (exit status, host that failed first)."""
        first = None if self.signals else self._first()
        if first:
            print(
                f"netlab: host {first} failed with {self._how(first)}; the end of {self._log(first)}:", file=sys.stderr
            )
            print(*self._said(first)[-TAIL:], sep="\n", file=sys.stderr)
            if self.held:
                print("netlab: what host 0 said after that:", file=sys.stderr, flush=True)
        while self.held:
            self._say_held()
        if first == 0 and self.failures[0][1] != REFUSED:
            print(f"netlab: host 0 failed with {self._how(0)}; its output is in {self._log(0)}", file=sys.stderr)
        for cut in self.down:
            print(f"netlab: the job was over while the link of host {cut.host} was down", file=sys.stderr)
        for cut in self.cuts:
            print(f"netlab: the job was over before the link of host {cut.host} was cut", file=sys.stderr)
        if self.signals:
            return 128 + self.signals[0], None
        return (0, None) if first is None else (self.failures[first][1], first)

    def _first(self) -> int | None:
        """Return the host whose failure is the likely cause.

        Killed hosts are considered first, since they could not report an error before the others, then hosts with
        output, then the rest. Within each class, hosts that only lost a peer are last, otherwise the earliest failure
        is first. If host 0 has the same last line, such as a refused configuration, it is returned instead.
        """
        if not self.failures:
            return None

        def rank(host: int) -> tuple[bool, bool, bool, float]:
            when, status = self.failures[host]
            said = "\n".join(self._said(host)[-TAIL:])
            return status < KILLED, not said, bool(LOST_PEER.search(said)), when

        first = min(self.failures, key=rank)
        last = self._said(first)[-1:]
        alike = 0 in self.failures and last and last == self._said(0)[-1:]  # all hosts report the same error
        return 0 if alike else first

    def _said(self, host: int) -> list[str]:
        with acting(self.user):  # not as root: the user may have replaced the file by a link
            return self._log(host).read_text(errors="replace", encoding="utf-8").splitlines()

    def _how(self, host: int) -> str:
        status = self.failures[host][1]
        killed = [signum.name for signum in signal.Signals if signum == status - 128]
        return f"exit status {status}" + "".join(f" ({name})" for name in killed)


def _sent(pid: int, interface: str) -> int:
    """Return the bytes sent in a process's network namespace; 0 before it enters the namespace or after its end."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="utf-8").splitlines():
            name, _, counts = line.partition(":")
            # before entering its namespace, a process has the machine's own network
            if name.strip() == interface and "10.77.0." in Path(f"/proc/{pid}/net/fib_trie").read_text(
                encoding="utf-8"
            ):
                return int(counts.split()[8])
    return 0

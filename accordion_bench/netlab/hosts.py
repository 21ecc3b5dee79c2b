"""Emulated hosts: network namespaces connected to a switch by rate-limited links.

    host 0: eth0 [tbf] ---- [tbf] host0 \\
    host 1: eth0 [tbf] ---- [tbf] host1  > bridge, in a separate namespace

The machine's own network does not change.
"""

import json
import os
import platform
import secrets
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from accordion_bench.comm.sealed_store import SECRET
from accordion_bench.netlab import janitor, job, options
from accordion_bench.netlab.options import Cut
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.runs.folder import NETLAB

INTERFACE = "eth0"  # of every host
PORT = 29500  # of the rendezvous; all ports of a lab are free
# burst as time at the link's rate; with 1 or 2 ms, late timers slow long messages by 10 % at 100 Mbit/s and by 20 to
# 70 % at 1 Gbit/s on two busy cores
BURST_SECONDS = 0.01
# bytes; holds a 64 KB packet of TCP with the headers of its 45 segments: tbf splits larger packets, which costs
# processor time
SMALLEST_BURST = 72_000
QUEUE = 32_000_000  # bytes queued per link; more than TCP has in flight, so that no packet is lost


def refuse(rate: float | None = None) -> None:
    """Raise ConfigError if this machine cannot emulate hosts; the message suggests an alternative."""
    model = f"for a modelled link python -m accordion_bench {options.modelled(rate)}"
    if platform.system() != "Linux":
        raise ConfigError(
            f"netlab must run on Linux, which has network namespaces, got {platform.system()}; type {model}"
        )
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise ConfigError(
            f"netlab must find ip and tc, got no {' and no '.join(missing)}; type apt install iproute2, or {model}"
        )
    if os.geteuid() != 0:
        raise ConfigError(
            f"netlab must run as root, got user {os.geteuid()}; type sudo and the same command, or {model}"
        )
    name = f"{janitor.new_lab()}-try"
    made = _called("ip", "netns", "add", name)
    _called("ip", "netns", "delete", name)
    if made:
        raise ConfigError(f"netlab must be allowed to make network namespaces, got {made}; type {model}")


class Hosts:
    """Context manager of emulated hosts 0 to N-1. Requires root.

    Args:
        number: N.
        rate: bit/s of each host's link per direction; None = no limit.
        slow: different rates by host.
        delay: seconds of delay per packet from a host to the switch.

    Raises:
        ConfigError: this machine cannot emulate hosts.
    """

    interface = INTERFACE

    def __init__(
        self, number: int, rate: float | None = None, slow: Mapping[int, float | None] | None = None, delay: float = 0.0
    ) -> None:
        self.number, self.delay = options.count(number), delay
        self.rates = [rate] * number
        for host, other in (slow or {}).items():
            self.rates[host] = other
        self._lab = janitor.new_lab()
        self._lock: FileLock | None = None
        self._secret = secrets.token_hex(16)
        self._janitor: subprocess.Popen | None = None

    def __enter__(self) -> "Hosts":
        refuse(self.rates[0])
        janitor.remove_orphans()
        self._lock = janitor.hold(self._lab)
        command = [sys.executable, "-m", "accordion_bench.netlab.janitor", self._lab]
        package = str(package_dir().parent)
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self._janitor = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, cwd="/", env={**os.environ, "PYTHONPATH": path}
        )
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes in the hosts, and remove the hosts."""
        if self._janitor is not None and self._janitor.stdin is not None:
            self._janitor.stdin.close()
            self._janitor.wait()
        if self._lock is not None:
            self._lock.release()
        self._janitor = None

    def namespace(self, host: int) -> str:
        """Return the name of a host's namespace, for `ip netns exec`."""
        return f"{self._lab}-{host}"

    @property
    def _switch(self) -> str:
        return f"{self._lab}-switch"

    @staticmethod
    def address(host: int) -> str:
        """Return a host's IP address."""
        return f"10.77.0.{host + 1}"

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables that a launcher sets for a host's only process, whose rank is the host's number.

        HOST_ADDR is the host's own address, which a launcher would otherwise obtain from a name server.
        """
        threads = max(1, len(os.sched_getaffinity(0)) // self.number)
        return {
            "RANK": str(host),
            "WORLD_SIZE": str(self.number),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "HOST_ADDR": self.address(host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),  # hosts share the cores
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            SECRET: self._secret,
            NETLAB: json.dumps(self.described()),
        }

    def described(self) -> dict[str, Any]:
        """Return the lab's description for environment.json: rates in bit/s, delay in seconds."""
        common = statistics.mode(self.rates)
        slow = {str(host): rate for host, rate in enumerate(self.rates) if rate != common}
        return {"hosts": self.number, "rate": common, "slow_host": slow, "delay": self.delay}

    def counters(self) -> list[tuple[int, int]]:
        """Return the bytes (sent, received) over each host's link."""
        counted = []
        for host in range(self.number):
            shown = _checked("ip", "-n", self.namespace(host), "-s", "-j", "link", "show", "dev", INTERFACE)
            stats = json.loads(shown)[0]["stats64"]
            counted.append((stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return counted

    def cut(self, host: int) -> None:
        """Take a host's link down."""
        _checked("ip", "-n", self._switch, "link", "set", f"host{host}", "down")

    def join(self, host: int) -> None:
        """Bring a host's link up again."""
        _checked("ip", "-n", self._switch, "link", "set", f"host{host}", "up")

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cuts: Sequence[Cut] = (),
        logs: Path | None = None,
    ) -> "job.JobOutcome":
        """Run a command in all hosts at the same time, and wait for its end. See `job.run`.

        Args:
            argv: the command.
            env: variables in addition to this process's and `environment`.
            cuts: temporary link failures.
            logs: folder for host-0.log, host-1.log, ...; None = a temporary one, which is kept if a host fails.
        """
        if cuts:
            told = {**self.described(), "cuts": [[cut.host, cut.seconds] for cut in cuts]}
            env = {**(env or {}), NETLAB: json.dumps(told)}
        return job.run(self, argv, env, cuts, logs)

    def _build(self) -> None:
        hosts = range(self.number)
        for name in (self._switch, *map(self.namespace, hosts)):
            _checked("ip", "netns", "add", name)
        lines = ["link add name bridge0 type bridge", "link set bridge0 up"]
        for host in hosts:
            pair = f"type veth peer name {INTERFACE} netns {self.namespace(host)}"
            lines += [f"link add host{host} {pair}", f"link set host{host} master bridge0 up"]
        _batch("ip", self._switch, lines)
        _batch("tc", self._switch, [self._shape(f"host{host}", self.rates[host]) for host in hosts])
        for host in hosts:
            name, delay = self.namespace(host), self._delay()
            lines = [
                "link set lo up",
                f"address add {self.address(host)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ]
            _batch("ip", name, lines)
            _batch("tc", name, [delay, self._shape(INTERFACE, self.rates[host], parent="1:1" if delay else "")])
            # Linux's default, for equal behaviour on machines with other settings
            _called("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic")

    def _delay(self) -> str:
        if not self.delay:
            return ""
        netem = f"qdisc add dev {INTERFACE} root handle 1: netem delay {self.delay * 1000:g}ms limit 100000"
        if said := _called("tc", "-n", self.namespace(0), *netem.split()):
            model = options.modelled(self.rates[0], self.delay)
            raise ConfigError(
                f"--delay must be left out where the kernel has no netem, got {said}; type, for a modelled delay, "
                f"python -m accordion_bench {model}"
            )
        return netem.replace("add", "replace", 1)

    @staticmethod
    def _shape(device: str, rate: float | None, parent: str = "") -> str:
        if rate is None:
            return ""
        where = f"parent {parent} handle 2:" if parent else "root"
        burst = burst_bytes(rate)
        return f"qdisc add dev {device} {where} tbf rate {rate:.0f}bit burst {burst} limit {QUEUE + burst}"


def burst_bytes(rate: float) -> int:
    """Return the burst in bytes of a link of this rate in bit/s."""
    return max(SMALLEST_BURST, round(BURST_SECONDS * rate / 8))


def _called(*command: str) -> str:
    """Run a command and return its error message, or "" on success."""
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0] if done.returncode else ""


def _checked(*command: str, stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}\n{stdin or ''}")
    return done.stdout


def _batch(tool: str, namespace: str, lines: list[str]) -> None:
    if commands := [line for line in lines if line]:
        _checked(tool, "-n", namespace, "-batch", "-", stdin="\n".join(commands) + "\n")

"""A process that has imported torch already enters one of netlab's hosts, as `ip netns exec` would have started it."""

import ctypes
import os
import subprocess

from accordion_bench.netlab.hosts import Hosts

OWN_MOUNTS = 0x20000  # CLONE_NEWNS
Entrance = tuple[str, dict[str, str]]  # a network namespace, and what a launcher tells there


def entrances(hosts: Hosts) -> list[Entrance]:
    """Those of all hosts, for processes that are no children of this one."""
    return [(hosts.namespace(host), hosts.environment(host)) for host in range(hosts.number)]


def enter(entrance: Entrance) -> None:
    """This thread, and those that it will start, see the host's interfaces, in /sys too, and its variables."""
    namespace, environ = entrance
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as network:
        if libc.setns(network.fileno(), 0) or libc.unshare(OWN_MOUNTS):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    subprocess.run(["mount", "-t", "sysfs", namespace, "/sys"], check=True)
    os.environ.update(environ)

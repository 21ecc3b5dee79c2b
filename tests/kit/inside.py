"""Move a process that has already imported torch into one of netlab's hosts, as if started by `ip netns exec`."""

import ctypes
import os
import subprocess

from accordion_bench.netlab.hosts import Hosts

OWN_MOUNTS = 0x20000  # CLONE_NEWNS
Entrance = tuple[str, dict[str, str]]  # a network namespace, and the variables of a launcher


def entrances(hosts: Hosts) -> list[Entrance]:
    """Return the entrances of all hosts, for processes that are not children of this one."""
    return [(hosts.namespace(host), hosts.environment(host)) for host in range(hosts.number)]


def enter(entrance: Entrance) -> None:
    """Enter the host's interfaces (also in /sys) and variables with this thread and all threads that it starts."""
    namespace, environ = entrance
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as network:
        if libc.setns(network.fileno(), 0) or libc.unshare(OWN_MOUNTS):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    subprocess.run(["mount", "-t", "sysfs", namespace, "/sys"], check=True)
    os.environ.update(environ)

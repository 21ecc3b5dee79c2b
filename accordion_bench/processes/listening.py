"""Listening: where rank 0 awaits the others. At the given address only, not at all of the machine's."""

import contextlib
import errno
import ipaddress
import socket
import sys

from accordion_bench.comm.sealed_store import SECRET
from accordion_bench.options.checks import ConfigError

LOOPBACK = "127.0.0.1"
ANSWER = 5.0  # seconds within which a machine must reach itself
BACKLOG = 4096  # who may knock at the same time
# of connections and files; a process needs a few, and one for each other process
MOST_DESCRIPTORS = 1 << 20


def listen(address: str, port: int, sealed: bool = False) -> socket.socket:
    """A socket that listens at this machine's address of that name, and at no other one.

    Where the machine's own name leads back to it alone, as it often does, others would not find it there: then it
    listens at all addresses, and says so. With an address that this machine does not have, translated on the way, say,
    it does so only where what others say there is sealed: the address may be mistyped, too.

    Args:
        address: name or number, as the other processes know it.
        port: to listen at.
        sealed: whether the processes share a secret.

    Raises:
        ConfigError: another program listens there, or the address is not this machine's.
    """
    why, own = f"{address} is no address that it has", False
    for family, found in _addresses(address, port):
        if ipaddress.ip_address(found).is_loopback and not _is_number(address):
            why = f"{address} leads back to itself there, which other machines could not follow"
            own = address != "localhost" and _is_own_name(address)
            continue
        with contextlib.suppress(_NotHere):
            return _bound(family, found, port, address)
    if not own and not sealed:
        raise ConfigError(
            f"MASTER_ADDR must be an address of rank 0's machine, got {address}: {why}; type export "
            f"MASTER_ADDR=ITS_NUMBER, or, where it is translated on the way, export {SECRET}=WORDS, with which rank 0 "
            "listens at all addresses"
        )
    print(
        f"warning: rank 0 listens at all addresses of its machine, because {why}; type export MASTER_ADDR=ITS_NUMBER",
        file=sys.stderr,
        flush=True,
    )
    return _bound(None, "", port, address)


def _is_own_name(address: str) -> bool:
    """Whether a name is the machine's, with its domain or without."""
    return address.lower().partition(".")[0] == socket.gethostname().lower().partition(".")[0]


class _NotHere(Exception):
    """The address is none of this machine's."""


def _bound(family: socket.AddressFamily | None, found: str, port: int, address: str) -> socket.socket:
    try:
        if family is not None:
            return socket.create_server((found, port), family=family, backlog=BACKLOG)
        if socket.has_dualstack_ipv6():
            return socket.create_server((found, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        return socket.create_server((found, port), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise _NotHere from None
        other = f"type export MASTER_PORT={port + 1 if port < 65535 else 29500}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"MASTER_PORT must be free on {address}, got {port}, where another program listens; {other}"
            ) from None
        raise ConfigError(
            f"MASTER_PORT must be a port at which this user may listen, got {port} ({error.strerror}); {other}"
        ) from None


def _addresses(address: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, str(where[0]).partition("%")[0]) for family, _, _, _, where in found]


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def loopback() -> str:
    """The name of the interface that leads to this machine alone; macOS calls it lo0.

    Raises:
        ConfigError: it is down, so that not even two processes of one machine can speak over a network.
    """
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=ANSWER),
        ):
            return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    except (OSError, StopIteration) as error:
        why = getattr(error, "strerror", None) or "there is none"
        raise ConfigError(
            f"the loopback must be up for processes to exchange on one machine, got {LOOPBACK}: {why}; type ip link "
            "set lo up, or comm=simulated for all workers in one process"
        ) from None


def raise_descriptor_limit() -> None:
    """Let this process have as many connections as it may: each needs a descriptor, and the usual limit is 1024."""
    try:
        import resource
    except ImportError:  # not on Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS has another limit, which it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

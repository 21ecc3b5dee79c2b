"""Listening socket of rank 0, bound to the given address only rather than to all addresses of the machine."""

import contextlib
import errno
import ipaddress
import socket
import sys

from accordion_bench.comm.sealed_store import SECRET
from accordion_bench.options.checks import ConfigError

LOOPBACK = "127.0.0.1"
ANSWER = 5.0  # timeout of a connection to the loopback, seconds
BACKLOG = 4096  # pending connections
# upper bound of file descriptors; a process needs a few, and one per other process
MOST_DESCRIPTORS = 1 << 20


def listen(address: str, port: int, sealed: bool = False) -> socket.socket:
    """Return a socket that listens at the given address of this machine only.

    If the machine's own name resolves to the loopback, as it often does, other machines could not connect there. The
    socket then listens at all addresses, with a warning. If the machine does not have the address, because it is
    translated on the way or mistyped, the socket listens at all addresses only if messages are sealed.

    Args:
        address: name or IP address that the other processes use.
        port: port.
        sealed: whether the processes share a secret.

    Raises:
        ConfigError: another program uses the port, or the machine does not have the address.
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
    return address.lower().partition(".")[0] == socket.gethostname().lower().partition(".")[0]


class _NotHere(Exception):
    """This machine does not have the address."""


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
    """Return the name of the loopback interface: `lo`, or `lo0` on macOS.

    Raises:
        ConfigError: the loopback is down, so that processes of one machine cannot communicate over a network.
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
    """Raise the limit of file descriptors to its maximum: each connection needs one, and the usual limit is 1024."""
    try:
        import resource
    except ImportError:  # not on Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit, which it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

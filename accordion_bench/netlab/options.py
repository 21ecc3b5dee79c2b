"""Parsers of netlab's option values: rates, durations, hosts and link failures."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.options.units import typed_rate

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3}
NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Cut:
    """Failure of a host's link for `seconds`, `at` seconds after that host has sent `job.FIRST_BYTES`."""

    host: int
    seconds: float
    at: float = 1.0


def rate(text: str, key: str = "--rate") -> float | None:
    """Parse a rate: bit/s for `100mbit`, None for `none`."""
    if text == "none":
        return None
    found = re.fullmatch(NUMBER + "(kbit|mbit|gbit)", text)
    if not found or not float(found[1]):
        raise ValueRefused(key, "a number with kbit, mbit or gbit, or none", text, _near(text))
    return float(found[1]) * UNITS[found[2]]


def _near(text: str) -> str:
    """Return a valid spelling of a rate such as `100Mbps`."""
    found = re.fullmatch(rf"\s*{NUMBER}\s*([kmg])b?(it)?(ps|/s)?\s*", text.lower())
    return f"{found[1]}{found[2]}bit" if found and float(found[1]) else "100mbit"


def slow_host(text: str, hosts: int) -> tuple[int, float | None]:
    """Parse `2:20mbit` to (host, bit/s)."""
    host, colon, speed = text.partition(":")
    if not colon:
        raise ValueRefused("--slow-host", "HOST:RATE", text, f"{hosts - 1}:20mbit")
    try:
        return _host("--slow-host", host, hosts, speed), rate(speed)
    except ValueRefused as refused:
        if refused.key == "--slow-host":
            raise
        rule = "HOST:RATE, with RATE " + refused.rule
        raise ValueRefused("--slow-host", rule, text, f"{host}:{refused.instead}") from None


def slow_hosts(texts: Sequence[str], hosts: int) -> dict[int, float | None]:
    """Parse several such values to bit/s by host; each host may occur once."""
    found: dict[int, float | None] = {}
    for text in texts:
        host, speed = slow_host(text, hosts)
        if host in found:
            raise ValueRefused("--slow-host", "given once for each host", text, texts[0])
        found[host] = speed
    return found


def cut(text: str, hosts: int) -> Cut:
    """Parse `2:5s@10s`: the link of host 2 is down for 5 seconds, starting 10 seconds after the first traffic."""
    found = re.fullmatch(rf"(\w+):{NUMBER}(ms|s|)(?:@{NUMBER}(ms|s|))?", text)
    if not found:
        raise ValueRefused("--cut", "HOST:SECONDSs or HOST:SECONDSs@AT", text, f"{hosts - 1}:5s@10s")
    host = _host("--cut", found[1], hosts, text.partition(":")[2])
    at = 1.0 if found[4] is None else float(found[4]) * SECONDS[found[5]]
    return Cut(host, float(found[2]) * SECONDS[found[3]], at)


def delay(text: str) -> float:
    """Parse `5ms` to seconds."""
    found = re.fullmatch(NUMBER + "(ms|s)", text)
    if not found:
        raise ValueRefused("--delay", "a number with ms or s", text, "5ms")
    return float(found[1]) * SECONDS[found[2]]


def _host(key: str, text: str, hosts: int, rest: str) -> int:
    if not text.isdigit() or int(text) >= hosts:
        raise ValueRefused(key, f"about one of the hosts 0 to {hosts - 1}", f"{text}:{rest}", f"{hosts - 1}:{rest}")
    return int(text)


def count(hosts: object) -> int:
    """Check the number of hosts, from 2 to 200."""
    number = int(hosts) if isinstance(hosts, str) and hosts.isdigit() else hosts
    checks.integer("--hosts", number, at_least=2, instead=4)
    if number > 200:  # type: ignore[operator]
        raise ValueRefused("--hosts", "at most 200", number, 4)
    return number  # type: ignore[return-value]


def presets() -> dict[str, float]:
    """Return the bandwidth in bit/s of the choices of `network=` that are named after their rate."""
    files = (conf_dir() / "network").glob("*bit.yaml")
    return {file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))["bandwidth"] for file in files}


def modelled(bandwidth: float | None, latency: float = 0.0) -> str:
    """Return the overrides for a modelled link of this bandwidth in bit/s and latency in seconds."""
    bandwidth = bandwidth or max(presets().values())
    if latency:
        return f"network=custom network.bandwidth={typed_rate(bandwidth)} network.latency={latency:g}"
    for name, known in presets().items():
        if math.isclose(bandwidth, known):
            return f"network={name}"
    return f"network=custom network.bandwidth={typed_rate(bandwidth)}"

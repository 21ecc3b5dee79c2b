"""Link probe in netlab: time collectives between the hosts, print a table and fit the options of a modelled link."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from accordion_bench.netlab.hosts import Hosts, burst_bytes
from accordion_bench.netlab.user import acting, caller
from accordion_bench.network import fit, links
from accordion_bench.network.links import MeasuredLink, link_table, write_measured_link
from accordion_bench.options.units import typed_rate

SECONDS = 15.0  # approximate total time of the repetitions


def probe(hosts: Hosts, out: Path) -> int:
    """Time collectives between all hosts, print the fitted link, and write link.json and probe.json into `out`.

    link.json is the input of `advise --link`. probe.json also contains the overhead of the interface counters and one
    line for all kinds of collective.

    Args:
        hosts: hosts of the lab.
        out: folder of the files.

    Returns:
        the exit status.

    Raises:
        ConfigError: times do not grow with message size.
    """
    shaped = [rate for rate in hosts.rates if rate is not None]
    pauses = [2 * 8 * burst_bytes(rate) / rate for rate in shaped]  # twice the refill time of tbf's burst
    user = caller()
    with acting(user):
        out.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="accordion_bench-")
    with temporary as folder:
        file = Path(folder) / "rows.json"
        words = [str(file), str(max([0.03, *pauses])), str(SECONDS)]
        outcome = hosts.run([sys.executable, "-m", "accordion_bench.netlab.probe", *words])
        if outcome.status:
            return outcome.status
        rows = json.loads(file.read_text(encoding="utf-8"))
    link = MeasuredLink(hosts.number, hosts.number, "gloo", "cpu", fit.costs(rows, with_burst=bool(shaped)))
    found = fit.summary(rows, with_burst=bool(shaped))
    facts = {"hosts": hosts.number, "rates": hosts.rates, "delay": hosts.delay, **found, "rows": rows}
    with acting(user):
        (out / "probe.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        write_measured_link(out / "link.json", link, rows)
    print("\n".join([*table(rows, found), "", link_table(link)]))
    print(
        f"\nIn {out / 'probe.json'} and {out / 'link.json'}. As a modelled link type\n\n"
        f"    {links.to_type(link)}\n\n"
        f"or, with one latency and rate for all kinds of collectives,\n\n    {to_type(found)}"
    )
    return 0


def table(rows: list[dict[str, Any]], found: dict[str, Any]) -> list[str]:
    """Return the fit as Markdown."""
    link = fit.Link(**{key: found["link"][key] for key in ("alpha", "beta", "burst")})
    lines = [
        "| collective | wire bytes | rounds | ms | fitted ms | link sent / wire | after calibration |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        counted = fit.Overhead(**found["overhead"][row["collective"]]).counted(row)
        lines.append(
            f"| {row['collective']} | {row['wire_bytes']:,} | {row['rounds']} | {1e3 * row['seconds']:.2f} | "
            f"{1e3 * link.seconds(row):.2f} | {row['link_sent_bytes'] / row['wire_bytes']:.4f} | "
            f"{row['link_sent_bytes'] / counted:.4f} |"
        )
    lines += [
        "",
        f"seconds = alpha rounds + beta max(0, wire bytes - burst): alpha = {1e3 * link.alpha:.3f} ms, "
        f"beta = {1e9 * link.beta:.3f} ns ({link.bandwidth / 1e6:.1f} Mbit/s), burst = {link.burst / 1e3:.0f} kB, "
        f"from {' and '.join(fit.RING)}.",
    ]
    for name, error in found["error"].items():
        cost = fit.Overhead(**found["overhead"][name])
        own = found["of_itself"][name]
        lines.append(
            f"{name}: residual error {100 * error:.0f} % (root mean square over sizes), the longest message takes "
            f"{found['longest'][name]:.2f} times as long as fitted; of itself {1e3 * own['alpha']:.2f} ms a round and "
            f"{own['bandwidth'] / 1e6:.1f} Mbit/s; calibrated per-message cost {cost.message:.0f} bytes a round, and "
            f"{100 * cost.share:.2f} % of wire bytes."
        )
    return lines


def to_type(found: dict[str, Any]) -> str:
    """Return the overrides for a modelled link with these numbers."""
    link = found["link"]
    words = f"network=custom network.bandwidth={typed_rate(link['bandwidth'])} network.latency={link['alpha']:.3g}"
    return words + (f" network.burst={link['burst']:.0f}" if link["burst"] else "")

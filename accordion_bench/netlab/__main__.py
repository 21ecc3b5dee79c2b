"""Command line `python -m accordion_bench.netlab`: run a job on emulated hosts, or time their links (`--probe`)."""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from accordion_bench import output
from accordion_bench.netlab import options
from accordion_bench.netlab.hosts import Hosts, burst_bytes, refuse
from accordion_bench.netlab.job import REFUSED, acting, caller
from accordion_bench.network import fit, links
from accordion_bench.network.links import MeasuredLink, link_table, write_measured_link
from accordion_bench.options.checks import ConfigError, integer
from accordion_bench.options.units import typed_rate

SECONDS = 15.0  # approximate total time of the repetitions
DESCRIPTION = """Run a job on several emulated hosts of one Linux machine. Each host has its own network namespace and a
rate-limited link.

    python -m accordion_bench.netlab --hosts 4 --rate 100mbit -- compressor=powersgd
    python -m accordion_bench.netlab --slow-host 2:20mbit --cut 1:5s@10s -- comm.timeout=60
    python -m accordion_bench.netlab --rate 1gbit --probe
    python -m accordion_bench.netlab --command 'torchrun --nnodes=$WORLD_SIZE --node_rank=$RANK \\
        --master_addr=$MASTER_ADDR -m accordion_bench comm=gloo'

Hosts are numbered from 0, like ranks. Needs root, and ip and tc of iproute2; under sudo the command is run by
the user who called it."""


def probe(hosts: Hosts, out: Path) -> int:
    """Time collectives between all hosts, print the fitted link, and write link.json and probe.json into `out`.

    link.json is the input of `advise --link`. probe.json also contains the overhead of the interface counters and one
    line for all kinds of collective. Returns the exit status.

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


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one sentence, without a usage summary."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; type --help for all options, and what is for accordion_bench after --\n")


def parser() -> argparse.ArgumentParser:
    """Return the argument parser. `options` reads the values, so that each error message is one sentence."""
    words = _Parser(
        "accordion_bench.netlab", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--hosts", default="4", metavar="N", help="number of hosts (%(default)s)")
    words.add_argument(
        "--rate", default="100mbit", help="rate of each link per direction, in kbit, mbit, gbit, or none (%(default)s)"
    )
    words.add_argument("--slow-host", action="append", default=[], metavar="I:RATE", help="another rate for host I")
    words.add_argument(
        "--cut",
        action="append",
        default=[],
        metavar="I:SECONDSs@AT",
        help="host I's link fails AT s after first traffic",
    )
    words.add_argument("--delay", default="0ms", help="delay of each packet to the switch; needs netem in the kernel")
    words.add_argument(
        "--probe", action="store_true", help="time collectives over these links, and fit a modelled link"
    )
    words.add_argument("--out", default="results/netlab", help="folder for the probe's link.json (%(default)s)")
    words.add_argument("--workers-per-host", metavar="W", help="comm.workers_per_process (1)")
    words.add_argument("--command", help="a shell command for every host, instead of python -m accordion_bench")
    words.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="after --, for python -m accordion_bench")
    return words


def job_of(args: argparse.Namespace) -> list[str]:
    """Return the command that every host runs."""
    if args.command is not None:
        if args.overrides:
            raise ConfigError(
                f"--command must stand without overrides, got {' '.join(args.overrides)}; type them inside --command"
            )
        return ["sh", "-c", args.command]
    typed = {item.partition("=")[0].lstrip("+") for item in args.overrides}
    own = {"comm": "gloo", "comm.interface": Hosts.interface}
    if args.workers_per_host is not None or "workers" not in typed:
        text = args.workers_per_host or "1"
        workers = integer("--workers-per-host", int(text) if text.isdigit() else text, at_least=1)
        own["comm.workers_per_process"] = str(workers)
    added = [f"{key}={value}" for key, value in own.items() if key not in typed]
    return [sys.executable, "-m", "accordion_bench", *added, *args.overrides]


@output.command
def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status: that of the host that failed first, or 2 for a user error."""
    args = parser().parse_args(argv)
    try:
        number = options.count(args.hosts)
        rate = options.rate(args.rate)
        slow = options.slow_hosts(args.slow_host, number)
        cuts = [options.cut(text, number) for text in args.cut]
        delay = options.delay(args.delay)
        command = job_of(args)
        if args.probe and (args.overrides or args.command or cuts):
            raise ConfigError(
                "--probe must stand without overrides, --command and --cut, got some; type --probe alone, then the job"
            )
        refuse(rate)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with Hosts(number, rate, slow, delay) as hosts:
            if args.probe:
                return probe(hosts, Path(args.out))
            outcome = hosts.run(command, cuts=cuts)
    except ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or after the job, which forwards signals
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    if outcome.status == REFUSED:
        return REFUSED
    sent = ", ".join(f"{count / 1e6:.2f}" for count in outcome.sent)
    print(
        f"netlab: {outcome.seconds:.1f} s; MB sent over the links of hosts 0 to {number - 1}: {sent}", file=sys.stderr
    )
    return outcome.status


if __name__ == "__main__":
    raise SystemExit(main())

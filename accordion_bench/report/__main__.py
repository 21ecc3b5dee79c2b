"""python -m accordion_bench.report RUN...: print the answer; write tables, figures and a page to --out.

On a terminal the table shows as many of six columns as fit; otherwise it equals table.md.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

from accordion_bench import output
from accordion_bench.options import checks, units
from accordion_bench.options.advice import explain
from accordion_bench.options.conf_dir import add_conf_dir, import_from_here
from accordion_bench.report import FIGURES, FORMATS, PAPERS, Print
from accordion_bench.runs.untrusted import printable

OF_FILES, OF_SERVE = ("out", "formats", "bandwidths", "figures", "pdf", "paper"), "port"  # options of one mode


@output.command
def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _report(args, parser)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2
    return 0


def _report(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Serve the page or write the report.

    Raises:
        ConfigError: an argument is invalid, contains no run, or cannot be written to.
    """
    _refuse_idle(args, parser)
    if args.config_dir is not None:
        add_conf_dir(args.config_dir)
    formats = [checks.choice("--formats", name.strip(), FORMATS) for name in args.formats.split(",")]
    bandwidths = tuple(_bandwidth(text) for text in args.bandwidths.split(","))
    drawn = [checks.choice("--figures", name.strip(), FIGURES) for name in (args.figures or "png").split(",")]
    drawn += ["pdf"] if args.pdf else []
    printed = Print(checks.choice("--paper", args.paper, tuple(PAPERS)), tuple(drawn), bandwidths)
    print(f"reading the runs in {printable(' '.join(args.runs))}", file=sys.stderr, flush=True)
    from accordion_bench.report import read
    from accordion_bench.report.compare.intervals import first  # these take seconds to import
    from accordion_bench.report.render import tables, write

    if args.config_dir is not None or args.trust:
        import_from_here()
    if args.trust:
        read.trust_classes(args.runs)
    if args.serve:
        from accordion_bench.report.serve import serve

        return serve(args.runs, args.port)
    folders = read.no_runs(args.runs)
    for said in first(write.skipped(folders)):
        print(f"warning: {said}", file=sys.stderr)
    runs = read.read_runs(args.runs)
    if not runs:
        raise checks.ConfigError(
            "RUN must be a run folder, a file of metrics rows or a folder that contains some, got "
            f"{printable(' '.join(args.runs))}; type python -m accordion_bench.report results/runs/*"
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.out):
            pass  # fail before the slow work
        every = args.figures is not None or args.pdf or args.paper != Print().paper
        written = write.write(runs, args.out, folders, formats, printed, every)
    except OSError as error:
        where, why = printable(str(args.out), longest=4096), printable(error.strerror or str(error))
        refused = f"--out must be a folder that can be written, got {where}: {why}; type --out=results/report"
        raise checks.ConfigError(refused) from error
    on_terminal = sys.stdout.isatty()
    print(tables.brief(written.parts, written.absent, output.columns()) if on_terminal else written.text)
    print(written.where)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("accordion_bench.report", description=__doc__)
    of_runs = "run folders, files of metrics rows written by your own loop, or folders that contain some"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=of_runs)
    parser.add_argument(
        "--out", type=Path, default=Path("results/report"), help="folder for tables and figures (%(default)s)"
    )
    parser.add_argument("--formats", default="md,csv,latex,html", help="formats of the tables, a subset of %(default)s")
    links = "links in the figure accuracy_modelled (modelled time), in bit/s or as 10gbit (%(default)s)"
    parser.add_argument("--bandwidths", default="1e8,1e9,1e10", help=links)
    every = "write every figure, as some of png,pdf,svg; default: those of README.md and those missing on the page"
    parser.add_argument("--figures", metavar="FORMATS", help=every)
    parser.add_argument("--pdf", action="store_true", help="short for --figures png,pdf")
    widths = ", ".join(f"{name} ({inches:g} inches)" for name, inches in PAPERS.items())
    parser.add_argument("--paper", default=Print().paper, help=f"width of every figure: {widths} (%(default)s)")
    followed = "write no files; serve a page on this machine that follows the runs as they progress"
    parser.add_argument("--serve", action="store_true", help=followed)
    port = "port of --serve (%(default)s); 0 = any free port"
    parser.add_argument("--port", type=int, default=8765, metavar="N", help=port)
    parser.add_argument("--config-dir", metavar="FOLDER", help="your own YAML files, whose classes are trusted")
    trust = "import the classes named in the run folders; only for folders whose code you trust"
    parser.add_argument("--trust", action="store_true", help=trust)
    return parser


def _refuse_idle(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    typed = [name for name in (*OF_FILES, OF_SERVE) if getattr(args, name) != parser.get_default(name)]
    if args.serve and (of_files := [name for name in typed if name != OF_SERVE]):
        raise checks.ConfigError(f"--serve writes no files, got --{of_files[0]}; leave it out")
    if not args.serve and OF_SERVE in typed:
        alone = f"--{OF_SERVE} must stand beside --serve, got it alone"
        raise checks.ConfigError(f"{alone}; type --serve --{OF_SERVE}={args.port}")


def _bandwidth(text: str) -> float:
    try:
        value = units.rate(text) or float(text)
    except ValueError:
        value = math.nan
    return checks.number("--bandwidths", text if math.isnan(value) else value, above=0, instead=1e9)


if __name__ == "__main__":
    raise SystemExit(main())

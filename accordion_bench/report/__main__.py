"""python -m accordion_bench.report RUN...: the answer on stdout; tables, figures and a page in --out.

On a terminal the table has as many of six columns as fit; elsewhere it is that of table.md."""

import argparse
import math
import sys
import tempfile
from pathlib import Path

from accordion_bench import output
from accordion_bench.options import checks, units
from accordion_bench.options.conf_dir import add_conf_dir, import_from_here
from accordion_bench.options.explain import explain
from accordion_bench.report.render import FIGURES, FORMATS, PAPERS, Print
from accordion_bench.runs.untrusted import printable

OF_FILES, OF_SERVE = ("out", "formats", "bandwidths", "figures", "pdf", "paper"), "port"  # options that say how


@output.command
def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _report(args, parser)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        sentence = explain(error)  # no memory, say
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2


def _report(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if (idle := _idle(args, parser)) is not None:
        print(idle, file=sys.stderr)
        return 2
    try:
        if args.config_dir is not None:
            add_conf_dir(args.config_dir)
        formats = [checks.choice("--formats", name.strip(), FORMATS) for name in args.formats.split(",")]
        bandwidths = tuple(_bandwidth(text) for text in args.bandwidths.split(","))
        drawn = [checks.choice("--figures", name.strip(), FIGURES) for name in (args.figures or "png").split(",")]
        drawn += ["pdf"] if args.pdf else []
        printed = Print(checks.choice("--paper", args.paper, tuple(PAPERS)), tuple(drawn), bandwidths)
    except checks.ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2
    print(f"reading the runs in {printable(' '.join(args.runs))}", file=sys.stderr, flush=True)
    from accordion_bench.report.compare import show  # what follows takes seconds to import
    from accordion_bench.report.read import find, load
    from accordion_bench.report.render import tables, write

    if args.config_dir is not None or args.trust:
        import_from_here()
    if args.trust:
        load.trust_classes(args.runs)
    if args.serve:
        return _served(args.runs, args.port)
    folders = find.no_runs(args.runs)
    for said in show.first(write.skipped(folders)):
        print(f"warning: {said}", file=sys.stderr)
    runs = load.read_runs(args.runs)
    if not runs:
        print(
            "RUN must be a run folder, a file of metrics rows or a folder that contains some, "
            f"got {printable(' '.join(args.runs))}; "
            "type python -m accordion_bench.report results/runs/*",
            file=sys.stderr,
        )
        return 2
    if (nowhere := _not_writable(args.out)) is not None:
        print(nowhere, file=sys.stderr)
        return 2
    try:
        every = args.figures is not None or args.pdf or args.paper != Print().paper
        written = write.write(runs, args.out, folders, formats, printed, every)
    except OSError as error:
        print(_not_written(args.out, error), file=sys.stderr)
        return 2
    on_terminal = sys.stdout.isatty()
    print(tables.brief(written.parts, written.absent, output.columns()) if on_terminal else written.text)
    print(written.where)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("accordion_bench.report", description=__doc__)
    of_runs = "run folders, files of metrics rows that a loop of your own has written, or folders that contain some"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=of_runs)
    parser.add_argument(
        "--out", type=Path, default=Path("results/report"), help="folder for tables and figures (%(default)s)"
    )
    parser.add_argument("--formats", default="md,csv,latex,html", help="of the tables, some of %(default)s")
    links = "of the links in the figure of modelled time, accuracy_modelled, bit/s or such as 10gbit (%(default)s)"
    parser.add_argument("--bandwidths", default="1e8,1e9,1e10", help=links)
    every = "every figure as a file: some of png,pdf,svg; else those of README.md and those that the page does not draw"
    parser.add_argument("--figures", metavar="FORMATS", help=every)
    parser.add_argument("--pdf", action="store_true", help="short for --figures png,pdf")
    widths = ", ".join(f"{name} ({inches:g} inches)" for name, inches in PAPERS.items())
    parser.add_argument("--paper", default=Print().paper, help=f"width of every figure: {widths} (%(default)s)")
    followed = "write nothing: a page, on this machine alone, that follows the runs while they go on"
    parser.add_argument("--serve", action="store_true", help=followed)
    port = "of --serve (%(default)s); 0 = any that is free"
    parser.add_argument("--port", type=int, default=8765, metavar="N", help=port)
    parser.add_argument("--config-dir", metavar="FOLDER", help="YAML files of your own, whose classes are trusted")
    trust = "import the classes that the run folders name: only of folders whose code you would run"
    parser.add_argument("--trust", action="store_true", help=trust)
    return parser


def _served(runs: list[str], port: int) -> int:
    from accordion_bench.report.serve import serve

    try:
        serve(runs, port)
    except checks.ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


def _idle(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    """The sentence for an option that would do nothing."""
    typed = [name for name in (*OF_FILES, OF_SERVE) if getattr(args, name) != parser.get_default(name)]
    if args.serve and (of_files := [name for name in typed if name != OF_SERVE]):
        return f"--serve writes no files, got --{of_files[0]}; leave it out"
    if not args.serve and OF_SERVE in typed:
        return f"--{OF_SERVE} must stand beside --serve, got it alone; type --serve --{OF_SERVE}={args.port}"
    return None


def _not_writable(out: Path) -> str | None:
    """The sentence for a folder that cannot be made or written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return None
    except OSError as error:
        return _not_written(out, error)


def _not_written(out: Path, error: OSError) -> str:
    where = printable(str(out), longest=4096)
    why = printable(error.strerror or str(error))
    return f"--out must be a folder that can be written, got {where}: {why}; type --out=results/report"


def _bandwidth(text: str) -> float:
    try:
        value = units.rate(text) or float(text)
    except ValueError:
        value = math.nan
    return checks.number("--bandwidths", text if math.isnan(value) else value, above=0, instead=1e9)


if __name__ == "__main__":
    raise SystemExit(main())

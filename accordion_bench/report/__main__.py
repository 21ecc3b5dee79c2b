"""python -m accordion_bench.report RUN...: the comparison table on stdout, table and figures in --out."""

import argparse
import sys
from pathlib import Path

from accordion_bench.report import load, write


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser("accordion_bench.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that contain some")
    parser.add_argument(
        "--out", type=Path, default=Path("results/report"), help="folder for table and figures (%(default)s)"
    )
    args = parser.parse_args(argv)
    for path in args.runs:
        if not load.find_runs([path]):
            print(f"warning: no run in {path}", file=sys.stderr)
    runs = load.read_runs(args.runs)
    if not runs:
        print(
            f"RUN must be a run folder or a folder that contains some, got {' '.join(args.runs)}; "
            "type python -m accordion_bench.report results/runs/*",
            file=sys.stderr,
        )
        return 2
    print(write.write(runs, args.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

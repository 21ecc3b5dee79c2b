"""python -m accordion_bench.conformance OVERRIDES: one line per property; exit status 1 where one fails."""

import argparse
import sys
from collections.abc import Sequence

from accordion_bench import output
from accordion_bench.options.advice import explain
from accordion_bench.options.conf_dir import add_conf_dir


@output.command
def main(arguments: Sequence[str]) -> int:
    """Check the compressor that the arguments select; return 0, 1 (a property fails) or 2 (invalid override)."""
    from accordion_bench import conformance

    parser = argparse.ArgumentParser("accordion_bench.conformance", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="compressor=topk, say")
    parser.add_argument("--config-dir", metavar="FOLDER", help="with a config group of your own: compressor/mine.yaml")
    args = parser.parse_intermixed_args(arguments)
    overrides = args.overrides
    try:
        if args.config_dir is not None:
            add_conf_dir(args.config_dir)
        make = conformance.from_overrides(overrides)
        make()
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2
    failed = 0
    for check in conformance.CHECKS:
        outcome = conformance.run(check, make)
        if outcome.status == "fail":
            failed += 1
        print(f"{outcome.name:<12} {outcome.status:<5} {outcome.text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Predict the advice without training, then measure it behind links; print Markdown and store all in results/advice.

    python -m scripts.studies.validate_advice trial          # what steps and codecs take, without a link
    python -m scripts.studies.validate_advice probe          # each link, in launches of their own
    python -m scripts.studies.validate_advice predict        # from these two, predicted.json.xz
    python -m scripts.studies.validate_advice measure        # every arm behind every link, measured.json.xz
    python -m scripts.studies.validate_advice compare        # both, as Markdown
    python -m scripts.studies.validate_advice break-even     # the rate at which an arm and dense take the same time
    python -m scripts.studies.validate_advice unseen         # 1 to 5 on networks and rates not looked at before

Every subcommand continues where it was stopped: entries of its file are not measured again. It needs root (network
namespaces) and a quiet machine.
"""

import argparse
import itertools
import subprocess
import sys
import time
from pathlib import Path

from accordion_bench.netlab import options
from accordion_bench.options.checks import ConfigError
from scripts.studies import advice_cells as cells
from scripts.studies.advice_cells import ARMS, CELL, KNOWN, MODELS, UNSEEN


def tell(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def check_links(args: argparse.Namespace) -> None:
    """Check the arguments before anything is measured."""
    for hosts, rate in itertools.product(args.hosts, args.rates):
        options.count(hosts)
        options.rate(rate, "--rates")


def measure(args: argparse.Namespace) -> None:
    """Measure every cell that is not in the file yet."""
    from scripts.studies.advice_measure import Work, circumstances, measured, missing

    path = args.out / "measured.json.xz"
    check_links(args)
    wanted = [dict(zip(CELL, one, strict=True)) for one in itertools.product(args.models, args.hosts, args.rates)]
    left = missing(cells.read(path), wanted, args.arms)
    work = {"arms": tuple(args.arms), "rounds": args.rounds, "seconds": args.seconds, "budget": args.budget}
    for number, cell in enumerate(left, 1):
        about, start = circumstances(), time.monotonic()
        arms = measured(Work(cell["model"], **work), cell["hosts"], options.rate(cell["rate"]))
        cells.keep(path, {**cell, "about": about, "arms": arms}, CELL)
        where = f"{cell['model']}, {cell['hosts']} hosts, {cell['rate']}"
        tell(f"{number} of {len(left)}: {where}: {time.monotonic() - start:.0f} s, load before {about['load']}")


def trial(args: argparse.Namespace) -> None:
    """Measure steps and codecs of every model that is not in the file yet."""
    from scripts.studies.advice_measure import circumstances
    from scripts.studies.advice_predict import beside
    from scripts.studies.advice_trial import tried

    path, key = args.out / "trial.json.xz", ("model", "processes")
    counts = sorted({*args.hosts, *map(beside, args.hosts)})
    for model, count in itertools.product(args.models, counts):
        if cells.find(cells.read(path), model=model, processes=count) is None:
            about, start = circumstances(), time.monotonic()
            found = tried(model, list(ARMS) if beside(count) == count else [], args.budget, count)
            cells.keep(path, {"model": model, "processes": count, "about": about, **found}, key)
            tell(f"{model} in {count} processes: {time.monotonic() - start:.0f} s, load before {about['load']}")


def probe(args: argparse.Namespace) -> None:
    """Probe every link that has no link.json yet."""
    from scripts.studies.advice_predict import link_folder

    check_links(args)
    for hosts, rate in itertools.product(args.hosts, args.rates):
        folder = link_folder(args.out, hosts, rate)
        if not (folder / "link.json").exists():
            lab = ["--hosts", str(hosts), "--rate", rate, "--probe", "--out", str(folder)]
            subprocess.run([sys.executable, "-m", "accordion_bench.netlab", *lab], check=True)


def predict(args: argparse.Namespace) -> None:
    """Predict every arm of every trial behind every probed link."""
    from scripts.studies.advice_predict import rows

    cells.write(
        args.out / "predicted.json.xz", list(rows(cells.written(args.out / "trial.json.xz", "trial"), args.out))
    )


def unseen(args: argparse.Namespace) -> None:
    """Run trial, probe, predict, measure and compare on networks and rates that were not used before."""
    probe(args)
    for model in args.models:  # each is tried just before it is measured: machines change within minutes
        for step in (trial, measure):
            step(argparse.Namespace(**{**vars(args), "models": [model]}))
    predict(args)
    compare(args)


def break_even(args: argparse.Namespace) -> None:
    """Find the rates at which arms and dense take the same time, measured and predicted."""
    from scripts.studies import advice_break_even as crossings
    from scripts.studies.advice_measure import Work, circumstances, measured
    from scripts.studies.advice_predict import trial_of

    path = args.out / "break_even.json.xz"
    options.count(args.hosts)
    trials = cells.written(args.out / "trial.json.xz", "trial")
    trial = trial_of(trials, args.model, args.hosts)
    if trial is None:
        raise ConfigError(
            f"{args.out / 'trial.json.xz'} must hold {args.model}, got others; type "
            f"python -m scripts.studies.validate_advice trial --models {args.model} --hosts {args.hosts}"
        )
    for arm in args.arms:
        predicted = crossings.predicted_crossing(trial, args.out, arm, args.hosts)
        work = Work(args.model, ("dense", arm), args.rounds, args.seconds, args.budget)

        def launch(rate: float, work: Work = work) -> cells.Cell:
            about = circumstances()
            tell(f"{work.arms[1]} behind {rate / 1e6:.0f} Mbit/s, load before {about['load']}")
            found = measured(work, args.hosts, rate)
            return {"about": about, "seconds": {name: one["seconds"] for name, one in found.items()}}

        key = {"arm": arm, "model": args.model, "hosts": args.hosts}
        found = crossings.measured_crossing(path, key, args.launches, launch)
        row = cells.find(cells.read(path), **key)
        told = {"measured": found.rate, "low": found.low, "high": found.high, "predicted": predicted.rate}
        cells.keep(path, {**key, **row, **told}, tuple(key))
    print("\n".join(crossings.table(cells.read(path))))


def compare(args: argparse.Namespace) -> None:
    """Print predictions and measurements side by side."""
    from scripts.studies.advice_compare import causes, page

    measured = cells.written(args.out / "measured.json.xz", "measure")
    predicted = cells.written(args.out / "predicted.json.xz", "predict")
    print(page(measured, predicted, causes(args.out / "causes.md"), cells.read(args.out / "measured_earlier.json.xz")))
    if (args.out / "break_even.json.xz").exists():
        from scripts.studies.advice_break_even import table

        print("\n".join(["## Break-even", "", *table(cells.read(args.out / "break_even.json.xz"))]))


def parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out", type=Path, default=cells.FOLDER, help="folder of all files (%(default)s)")
    models = argparse.ArgumentParser(add_help=False)
    models.add_argument("--models", nargs="+", default=list(KNOWN), choices=list(MODELS), metavar="MODEL")
    hosts = argparse.ArgumentParser(add_help=False)
    hosts.add_argument("--hosts", nargs="+", type=int, default=[2, 3, 4], metavar="N")
    rates = argparse.ArgumentParser(add_help=False)
    rates.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1gbit"], metavar="RATE")
    arms = argparse.ArgumentParser(add_help=False)
    arms.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    timing = argparse.ArgumentParser(add_help=False)
    timing.add_argument("--rounds", type=int, default=7)
    timing.add_argument("--seconds", type=float, default=0.7, help="of one arm in one round, about (%(default)s)")
    timing.add_argument("--budget", type=float, default=60.0, help="seconds of all rounds of a launch (%(default)s)")
    commands = words.add_subparsers(required=True, metavar="SUBCOMMAND")

    def add(name: str, run: object, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        told = str(run.__doc__).splitlines()[0]
        one = commands.add_parser(name, parents=[out, *parents], help=told, description=told)
        one.set_defaults(run=run)
        return one

    seconds = add("trial", trial, models, hosts)
    seconds.add_argument("--budget", type=float, default=60.0, help="seconds for the codecs of a model (%(default)s)")
    add("probe", probe, hosts, rates)
    add("predict", predict)
    add("measure", measure, models, hosts, rates, arms, timing)
    add("compare", compare)
    new = add("unseen", unseen, models, hosts, rates, arms, timing)
    new.set_defaults(out=cells.FOLDER / "unseen", models=list(UNSEEN), hosts=[2], rates=["70mbit", "300mbit"])
    even = add("break-even", break_even, timing)
    even.add_argument("--arms", nargs="+", default=["PowerSGD 4", "TopK", "dist-EF"], choices=list(ARMS), metavar="ARM")
    even.add_argument("--model", default="resnet18", choices=list(MODELS))
    even.add_argument("--hosts", type=int, default=2, metavar="N")
    even.add_argument("--launches", type=int, default=6, help="of each arm (%(default)s)")
    return words


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    try:
        args.run(args)
    except ConfigError as refused:
        sys.exit(str(refused))


if __name__ == "__main__":
    main()

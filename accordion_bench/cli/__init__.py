"""Command line: argument checks, help, sweeps, dry runs, smoke test, advice, demo and display of runs."""

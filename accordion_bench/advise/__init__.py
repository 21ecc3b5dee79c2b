"""Command `python -m accordion_bench.advise`: predict the step time of each method on a cluster, without training."""

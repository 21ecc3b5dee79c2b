"""Whether a launcher has started this process: the question that needs no torch, before `placement` decides."""

import os

# by which torchrun, OpenMPI and Slurm number their processes, as `placement.environment_ranks` looks for them
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def launched() -> bool:
    """Whether torchrun, Slurm or OpenMPI has started this process."""
    return any(name in os.environ for name in RANKS)


def leads() -> bool:
    """Whether this process is the first of those that a launcher has started, or the only one."""
    told = [os.environ[name] for name in RANKS if name in os.environ]
    return not int(told[0] if told else 0)

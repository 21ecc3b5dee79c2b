"""Detection of launchers from environment variables, without importing torch; `placement` reads the details."""

import os

# rank variables of torchrun, OpenMPI and Slurm, as read by `placement.environment_ranks`
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def launched() -> bool:
    """Whether torchrun, Slurm or OpenMPI started this process."""
    return any(name in os.environ for name in RANKS)


def leads() -> bool:
    """Whether this process has rank 0, or was started without a launcher."""
    told = [os.environ[name] for name in RANKS if name in os.environ]
    return not int(told[0] if told else 0)

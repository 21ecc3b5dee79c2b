"""GPUs: what the processes of a run ask of torch.cuda, asked here alone; which one is this process's own."""

from collections.abc import Mapping, Sequence

import torch

from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.sealed_store import SealedStore, whole_number


def count() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count()


def own(local_rank: int, seen: int) -> torch.device:
    """The GPU that this process computes on.

    Args:
        local_rank: of the process on its machine.
        seen: how many GPUs it sees; one alone is its own, whatever its rank.
    """
    return torch.device("cuda", local_rank % seen)


def take(device: torch.device) -> None:
    """Make it the GPU of this thread, before anything lands on the first one."""
    torch.cuda.set_device(device)


def uuid(device: torch.device) -> str:
    """What no other GPU is called, whatever its number in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def model(device: torch.device) -> str:
    """What its maker calls it."""
    return torch.cuda.get_device_name(device)


def identity(uuid: str, index: int, environ: Mapping[str, str]) -> str:
    """What this process computes on: a GPU, or the part of one that CUDA_VISIBLE_DEVICES names.

    Args:
        uuid: of the GPU.
        index: its number in this process.
        environ: of the process.
    """
    names = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = names[index].strip() if index < len(names) else ""
    return f"{uuid} {name}" if name.startswith("MIG-") else uuid


def refuse_shared(store: SealedStore, rank: int, mine: str) -> None:
    """Refuse to share a GPU with another process; NCCL would say so in words of its own, or hang.

    Args:
        store: of the run.
        rank: of this process.
        mine: the `identity` of its GPU.

    Raises:
        ConfigError: another process of the run has it already.
    """
    first = store.first(f"gpu {mine}", str(rank), whole_number)
    if first != rank:
        raise ConfigError(
            f"comm=nccl must have a GPU for each process, got {mine} for the ranks {first} and {rank}; type comm=gloo "
            "where they are to share it, or let each process see its own (Slurm: srun --gpus-per-task=1)"
        )


def unlike(models: Sequence[str]) -> str:
    """The sentence for a run on GPUs of several kinds; "" where all are alike.

    Args:
        models: of all processes, by rank.
    """
    ranks = {model: [rank for rank, other in enumerate(models) if other == model] for model in models}
    if len(ranks) < 2:
        return ""
    kinds = ", ".join(
        f"{model} ({'ranks' if len(own) > 1 else 'rank'} {_numbers(own)})" for model, own in ranks.items()
    )
    return (
        f"this run has GPUs of {len(ranks)} kinds: {kinds}; the slowest sets the pace, and each rounds in its own way"
    )


def _numbers(ranks: Sequence[int]) -> str:
    """`0-3`, or `0, 2, 5 ...`."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks[:3])) + (" ..." if len(ranks) > 3 else "")

"""DDP hooks as users write them, and functions that are not valid hooks."""

import torch
import torch.distributed as dist

from accordion_bench.options.checks import ConfigError

TORCHS = "torch.distributed.algorithms.ddp_comm_hooks"
NUMBER = 3


def mean(state, bucket):
    """Return the mean over the workers, as without a hook."""
    sent = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return sent.get_future().then(lambda done: done.value()[0])


def scaled(state, bucket):
    """Return the mean times 1, 2, 3, 1, ... by step, so that a lost state is detected."""
    state.own += (1 + dist.get_rank()) * bucket.is_last()
    factor = 1 + state.steps % 3
    state.steps += bucket.is_last()
    return mean(state, bucket).then(lambda done: done.value() * factor)


def alone(state, bucket):
    """Return a result that differs from worker to worker."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def of_one(state):
    """Not a hook: it has no argument for the bucket."""


def renamed(state, gradients):
    """Not a hook: torch requires an argument named `bucket`."""


def annotated(state, bucket: "dist.GradBucket"):
    """A hook that torch refuses, because the annotation is a string."""
    return mean(state, bucket)


class Kept:
    """A state that can be saved, and differs from worker to worker."""

    def __init__(self, process_group, steps: int = 0) -> None:
        assert process_group is dist.group.WORLD
        self.steps, self.own = steps, torch.zeros(())

    def state_dict(self):
        return {"steps": self.steps, "own": self.own.clone()}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        self.own.copy_(state["own"])


class Lost:
    """A state that cannot be saved."""

    def __init__(self, process_group, most: int = 1) -> None:
        if most < 1:
            raise ValueError("most must be at least 1")


def kept(process_group):
    return Kept(process_group)


def lost(process_group):
    return Lost(process_group)


def refusing(process_group):
    raise ConfigError("never called")

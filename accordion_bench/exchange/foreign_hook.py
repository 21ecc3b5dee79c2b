"""Third-party communication hooks of DistributedDataParallel, given by their import path."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import imported

PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
EXAMPLE = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:fp16_compress_hook"
EXAMPLE_OF_STATE = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook:PowerSGDState"
SAVED_BY = ("state_dict", "load_state_dict")


@dataclass(frozen=True)
class ForeignHook:
    """A hook and the factory of its state, by import path."""

    # `package.module:function`; called for each bucket as function(state, bucket), returns a Future of the mean
    # gradients of the bucket
    path: str
    # `package.module:factory`; called once in each process as factory(process_group, **options), with the group of all
    # workers; None = the state is None
    state_path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the factory

    def function(self) -> Callable:
        """Return the hook; ConfigError if it cannot be imported, or does not take a state and a bucket."""
        found = _callable("comm.hook", self.path, "function", EXAMPLE)
        named = hasattr(found, "__qualname__")  # required by torch
        if not named or list(_parameters(found))[1:2] != ["bucket"] or not _takes(found, None, None):
            rule = "a function of two arguments, state and bucket, the second of this name"
            raise ConfigError(f"comm.hook must be {rule}, got {self.path}; type comm.hook={EXAMPLE}, say")
        return found

    def factory(self) -> Callable | None:
        """Return the state's factory, or None; ConfigError if it cannot be imported, or does not take the options."""
        if self.state_path is None:
            return None
        found = _callable("comm.hook_state", self.state_path, "factory", EXAMPLE_OF_STATE)
        if not _takes(found, None, **self.options):
            known = list(_parameters(found))[1:]
            takes = f"takes {', '.join(known)}" if known else "takes none"
            raise ConfigError(
                f"comm.hook_options must be what {self.state_path} takes beside the process group, got "
                f"{checks.show(dict(self.options))}, and it {takes}; type comm.hook_options=null, or others"
            )
        return found

    def register(self, module: DistributedDataParallel) -> Any:
        """Register the hook, and return its new state; ConfigError if the factory or the module refuses."""
        state = self._new_state()
        try:
            module.register_comm_hook(state, self.function())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"comm.hook must be one that DistributedDataParallel takes, got {self.path}: "
                f"{str(error).rstrip('.')}; type comm.hook={EXAMPLE}, say"
            ) from error
        return state

    def _new_state(self) -> Any:
        make = self.factory()
        if make is None:
            return None
        try:
            return make(dist.group.WORLD, **self.options)
        except Exception as error:
            options = checks.show(dict(self.options))
            raise ConfigError(
                f"comm.hook_options must be accepted by {self.state_path}, got {options}: {error}; type others"
            ) from error


def refuse_hook(path: object, state_path: object, options: object) -> None:
    """Check the options of a hook, its state and the state's options, whatever the rest of the run is; None = unset."""
    if path is not None:
        _parts("comm.hook", path, "function", EXAMPLE)
    if state_path is not None and path is None:
        raise ValueRefused("comm.hook_state", "{null} without comm.hook", state_path, None)
    if state_path is not None:
        _parts("comm.hook_state", state_path, "factory", EXAMPLE_OF_STATE)
    if not isinstance(options, Mapping | None):
        raise ValueRefused("comm.hook_options", "{null} or a group of options", options, None)
    if options is not None and state_path is None:
        raise ValueRefused("comm.hook_options", "{null} without comm.hook_state", options, None)


def can_be_saved(state: Any) -> bool:
    """Whether a hook's state, or its class, has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(state, name, None)) for name in SAVED_BY)


def _parts(key: str, path: object, what: str, example: str) -> tuple[str, str, str]:
    """Split a path into module and name, and return them with the rule for error messages."""
    rule = f"{key} must be package.module:{what} of a module that can be imported, got {checks.show(path)}"
    named = PATH.fullmatch(path) if isinstance(path, str) else None
    if named is None:
        raise ConfigError(f"{rule}; type {key}={example}, say")
    return named[1], named[2], rule


def _callable(key: str, path: str, what: str, example: str) -> Callable:
    module, name, rule = _parts(key, path, what, example)
    found = imported(module, name, rule, f"{key}={example}, say")
    if not callable(found):
        raise ConfigError(f"{key} must name what can be called, got {path}, a {type(found).__name__}; type {key}=null")
    return found


def _parameters(called: Callable) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name; empty if Python cannot inspect it, such as some C functions."""
    try:
        return inspect.signature(called).parameters
    except ValueError:
        return {}


def _takes(called: Callable, *arguments: Any, **options: Any) -> bool:
    """Whether a callable accepts these arguments; True if Python cannot inspect it."""
    try:
        inspect.signature(called).bind(*arguments, **options)
    except TypeError:
        return False
    except ValueError:
        pass
    return True

"""Parameters of a user's model with one worker per process, checks of them, and parameters exempt from compression."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accordion_bench.attaching.agreement import answer
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.replicas import Replicas, Tensors
from accordion_bench.optimizers.inner import EMBEDDINGS, tables_of
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import as_real, is_sharded

CARRIED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DistributedDataParallel and torch.compile


class OwnParameters(Replicas):
    """Parameters of one worker, whose replica is the model itself; arguments as for `Replicas`."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], comm: Comm, tables: Collection[str] = ()) -> None:
        super().__init__(named, comm, tables)
        self._anchor: list[Tensor] = []
        self.delivers = False  # whether another object writes the exchanged gradients in `applied` to the parameters
        self.applied: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        self._seen: dict[int, tuple[Tensor, int]] = {}  # index -> taken gradient, its version
        self.samples = False  # whether the first number of each gradient is kept, to detect writes without a version
        self._firsts: dict[int, Tensor] = {}  # index -> first number of the taken gradient

    @property
    def shared(self) -> list[Tensor]:
        """Values that are equal on all workers: the parameters, or after `fork` the last consensus."""
        return self._anchor or [as_real(param.data) for param in self.params]

    @shared.setter
    def shared(self, values: list[Tensor]) -> None:
        self._anchor = values

    @torch.no_grad()
    def taken(self, i: int) -> Tensor:
        gradient = self.params[i].grad
        if i not in self._taken and gradient is not None:
            self.take(i, gradient)
            if self.samples and self._taken[i].numel():
                self._firsts[i] = _first_number(gradient).clone()
        return self._taken[i]

    def take(self, i: int, gradient: Tensor) -> None:
        """Take the gradient of one parameter in this step, complex or as a real tensor; ConfigError if it is sparse."""
        if gradient.layout != torch.strided:
            raise ConfigError(
                f"gradients must be dense tensors, got a sparse one of {self.specs[i].name}; pass sparse=False to the "
                "module that makes it"
            )
        self._seen[i] = gradient, gradient._version
        self._taken[i] = as_real(gradient.detach()).contiguous().unsqueeze(0)

    @property
    def has_taken(self) -> bool:
        """Whether a gradient of this step has been taken."""
        return bool(self._taken)

    def is_taken(self, i: int) -> bool:
        """Return whether the gradient of one parameter has been taken."""
        return i in self._taken

    def was_reset(self, i: int) -> bool:
        """Return whether `zero_grad` was called since the gradient was taken: it was replaced or set to zero.

        Call it directly after autograd has accumulated once, which increments the version by one. FSDP2 accumulates
        into the shard inside, which does not change the version.
        """
        gradient, version = self._seen[i]
        version += not is_sharded(gradient)
        return gradient is not self.params[i].grad or (not gradient._is_view() and gradient._version > version)

    @torch.no_grad()
    def collect(self, give: bool = False) -> None:
        """Store the gradients of the step in `gradients_W`, zeros where there is none; `give`: as gradients, too."""
        for i, param in enumerate(self.params):
            if i not in self._taken:
                gradient = torch.zeros_like(param) if param.grad is None else param.grad
                self.take(i, gradient)
                if give:
                    param.grad = gradient
        self.gradients_W = [self._taken[i] for i in range(len(self.params))]

    def changed(self) -> str | None:
        """Return the name of the first parameter whose gradient was modified or replaced since it was taken, or None.

        Call it before `collect`. Gradients that are views of one buffer share a version, which is not compared.
        `GradScaler.unscale_` and writes to `grad.data` do not change the version. With `samples` they are detected by
        the first number of each gradient.
        """
        if self.delivers:  # the gradients taken are not those of the parameters
            return None
        for i, (gradient, version) in sorted(self._seen.items()):
            if self.params[i].grad is not gradient or (not gradient._is_view() and gradient._version != version):
                return self.specs[i].name
        if not self._firsts:
            return None
        before = torch.stack([first.double() for first in self._firsts.values()])
        now = torch.stack([_first_number(self._seen[i][0]).double() for i in self._firsts])
        other = ((now != before) & ~(now.isnan() & before.isnan())).nonzero()
        return self.specs[list(self._firsts)[int(other[0, 0])]].name if len(other) else None

    def forget(self) -> None:
        """Clear the gradients at the end of a step, or if it is discarded."""
        self.gradients_W, self.applied, self.delivers = [], [], False
        self._taken.clear()
        self._seen.clear()
        self._firsts.clear()

    @torch.no_grad()
    def apply(self, updates: Sequence[Tensor]) -> None:
        if self.delivers:
            self.applied = list(updates)
            return
        super().apply([update.data for update in updates])  # views of one vector share a version; their `data` does not
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self._seen[i] = param.grad, param.grad._version

    def differences(self, anchor: Sequence[Tensor], rows: range, tensors: Tensors = None) -> list[Tensor]:
        if not self.gradients_W:  # between two steps
            self.gradients_W = [torch.empty_like(value).unsqueeze(0) for value in self.shared]
        moved_W = super().differences(anchor, rows, tensors)
        for param in self.params:  # their memory is overwritten by differences
            param.grad = None
        return moved_W

    @torch.no_grad()
    def fork(self) -> None:
        self.shared = [value.clone(memory_format=torch.contiguous_format) for value in self.shared]
        self.replicas = [self.params]


def _first_number(gradient: Tensor) -> Tensor:
    """Return a view [1] of the first number of a tensor that has entries."""
    return as_real(gradient.detach()).as_strided((1,), (1,))


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names, without prefixes of wrappers, and parameters that are trained."""
    return [(plain_name(name), param) for name, param in model.named_parameters() if param.requires_grad]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside a wrapper of torch.compile."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def is_fsdp(model: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a model or a part of it, without importing FSDP2."""
    return any(cls.__name__ == "FSDPModule" for module in model.modules() for cls in type(module).__mro__)


def reshard(model: nn.Module) -> None:
    """Reshard an FSDP2 model, so that its parameters are shards instead of gathered parameters."""
    for module in model.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def refuse_tensors(model: nn.Module) -> None:
    """Raise ConfigError, with the reason, for the first trained parameter that cannot be exchanged."""
    in_shards = is_fsdp(model)
    for name, param in trained_parameters(model):
        if what := _cannot_be_carried(as_real(param) if in_shards else param):
            raise ConfigError(
                "parameters must be dense tensors of float16, bfloat16, float32, float64 or complex numbers, got "
                f"{name}, which is {what}"
            )
    for name, module in model.named_modules():
        if isinstance(module, EMBEDDINGS) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"gradients must be dense tensors, got {plain_name(name) or type(module).__name__} with sparse=True; "
                "pass sparse=False to it"
            )


def _cannot_be_carried(param: Tensor) -> str:
    """Return why a parameter cannot be exchanged, and what to do; "" = it can."""
    if is_lazy(param):
        return "lazy and has no shape yet; run one batch through the model first"
    if is_sharded(param):
        return "a DTensor; call fully_shard on the model, and use no tensor parallelism beside it"
    if param.is_meta:
        return "on the meta device and holds no numbers; call model.to_empty(device=...) and initialise it first"
    if param.is_nested or param.layout != torch.strided:
        layout = "nested" if param.is_nested else str(param.layout).removeprefix("torch.")
        return f"of layout {layout}; store it densely"
    if param.is_quantized or param.dtype not in CARRIED:
        return f"of type {str(param.dtype).removeprefix('torch.')}; convert it, or call requires_grad_(False)"
    if is_traceable_wrapper_subclass(param):
        return f"a {type(param.data).__name__}; convert it to a plain tensor, or call requires_grad_(False)"
    return ""


def plain_name(name: str) -> str:
    """Return `layer.weight` for `module._orig_mod.layer.weight`."""
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def trained_tables(model: nn.Module) -> set[str]:
    """Return the names of trained embeddings and the output layer, as in `trained_parameters`."""
    return {plain_name(name) for name in tables_of(model)}


def trained_specs(model: nn.Module) -> list[TensorSpec]:
    """Return names and shapes of trained parameters, and which are tables."""
    tables = trained_tables(model)
    return [TensorSpec(name, tuple(as_real(param).shape), name in tables) for name, param in trained_parameters(model)]


Exempt = str | Callable[[str, nn.Parameter], bool] | None
WORDS = ("norm", "bias", "embedding")


def exempt_names(exempt: Exempt, model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are never compressed.

    Args:
        exempt: words, such as `norm,bias`, for parameters of normalisation layers, biases, embeddings; or a function
            of name and parameter that returns whether it is exempt; None = none.
        model: the model.

    Raises:
        ConfigError: a word is unknown, the type is wrong, or the function raises an exception.
    """
    if exempt is None:
        return frozenset()
    if callable(exempt):
        named = ((plain_name(name), param) for name, param in model.named_parameters())
        return frozenset(name for name, param in named if answer("exempt", exempt, name, param))
    words = [word.strip() for word in exempt.split(",")] if isinstance(exempt, str) else []
    if not words or any(word not in WORDS for word in words):
        unknown = next((word for word in words if word not in WORDS), exempt)
        near = checks.closest(unknown, WORDS, cutoff=0.6) if isinstance(unknown, str) else ""
        raise ConfigError(
            f"exempt must be made of {', '.join(WORDS)}, or be a function of name and parameter, got {unknown!r}; "
            f"pass exempt={near or 'norm,bias'!r}"
        )
    found = {  # a shared parameter has its name in the first module
        id(param)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if any(_is(word, module, name) for word in words)
    }
    return frozenset(plain_name(name) for name, param in model.named_parameters() if id(param) in found)


def _is(word: str, module: nn.Module, name: str) -> bool:
    if word == "bias":
        return "bias" in name
    return word in type(module).__name__.lower()

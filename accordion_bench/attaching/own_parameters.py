"""The parameters of a user's own model, which this process's one worker trains; and those that always travel dense."""

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
from accordion_bench.tensors.real_view import as_real, is_sharded

CARRIED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel's and torch.compile's


class OwnParameters(Replicas):
    """One worker: its replica is the model itself.

    Args:
        named: names and parameters that are trained.
        comm: of one worker in each process.
        tables: as for `Replicas`.

    Attributes:
        delivers: another object puts the exchanged gradients of this step into the parameters; they wait in `applied`.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], comm: Comm, tables: Collection[str] = ()) -> None:
        super().__init__(named, comm, tables)
        self._anchor: list[Tensor] = []
        self.delivers = False
        self.applied: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        self._seen: dict[int, tuple[Tensor, int]] = {}  # gradients that were taken, and their versions

    @property
    def shared(self) -> list[Tensor]:
        """The values that all workers have in common: what the parameters hold now, since `fork` the last consensus."""
        return self._anchor or [as_real(param.data) for param in self.params]

    @shared.setter
    def shared(self, values: list[Tensor]) -> None:
        self._anchor = values

    # ---- gradients of a step

    @torch.no_grad()
    def taken(self, i: int) -> Tensor:
        gradient = self.params[i].grad
        if i not in self._taken and gradient is not None:
            self.take(i, gradient)
        return self._taken[i]

    def take(self, i: int, gradient: Tensor) -> None:
        """This is the gradient of one parameter in this step, complex or already as a real tensor.

        Raises:
            ConfigError: it is sparse.
        """
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
        """Whether the gradient of one parameter has been taken."""
        return i in self._taken

    def was_reset(self, i: int) -> bool:
        """Whether `zero_grad` has come since the gradient was taken: it is another tensor, or was set to zero.

        Call it when autograd has just added to the gradient once, which moves its version by one; FSDP2 adds to the
        shard within it, which moves none.
        """
        gradient, version = self._seen[i]
        version += not is_sharded(gradient)
        return gradient is not self.params[i].grad or (not gradient._is_view() and gradient._version > version)

    @torch.no_grad()
    def collect(self, give: bool = False) -> None:
        """All gradients of the step into `gradients_W`; a parameter that the loss does not reach has a zero one.

        Args:
            give: its optimizer is to see it, too.
        """
        for i, param in enumerate(self.params):
            if i not in self._taken:
                gradient = torch.zeros_like(param) if param.grad is None else param.grad
                self.take(i, gradient)
                if give:
                    param.grad = gradient
        self.gradients_W = [self._taken[i] for i in range(len(self.params))]

    def changed(self) -> str | None:
        """The first parameter whose gradient has been written to since it was taken; None = none has.

        Nothing is known of gradients that are parts of one buffer: they have one version together.
        """
        seen = sorted((i, *pair) for i, pair in self._seen.items() if not pair[0]._is_view())
        return next((self.specs[i].name for i, gradient, version in seen if gradient._version != version), None)

    def forget(self) -> None:
        """The step is over, or given up."""
        self.gradients_W, self.applied, self.delivers = [], [], False
        self._taken.clear()
        self._seen.clear()

    @torch.no_grad()
    def apply(self, updates: Sequence[Tensor]) -> None:
        if self.delivers:
            self.applied = list(updates)
            return
        super().apply([update.data for update in updates])  # parts of one vector share a version, their data does not
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self._seen[i] = param.grad, param.grad._version

    # ---- replicas

    def differences(self, anchor: Sequence[Tensor], rows: range, tensors: Tensors = None) -> list[Tensor]:
        if not self.gradients_W:  # between two steps
            self.gradients_W = [torch.empty_like(value).unsqueeze(0) for value in self.shared]
        moved_W = super().differences(anchor, rows, tensors)
        for param in self.params:  # their memory holds differences now
            param.grad = None
        return moved_W

    @torch.no_grad()
    def fork(self) -> None:
        self.shared = [value.clone(memory_format=torch.contiguous_format) for value in self.shared]
        self.replicas = [self.params]


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that are trained, without what wrappers put in front of names."""
    return [(plain_name(name), param) for name, param in model.named_parameters() if param.requires_grad]


def unwrapped(model: nn.Module) -> nn.Module:
    """What torch.compile has wrapped."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def is_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on it, or on a part of it; FSDP2 is not imported to see that."""
    return any(cls.__name__ == "FSDPModule" for module in model.modules() for cls in type(module).__mro__)


def reshard(model: nn.Module) -> None:
    """Let the parameters of an FSDP2 model be its shards, which those that a forward pass has gathered are not."""
    for module in model.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def refuse_tensors(model: nn.Module) -> None:
    """Refuse trained parameters that no exchange can carry, whatever the method.

    Raises:
        ConfigError: naming the first, and what it is.
    """
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
    """What makes a parameter unfit for an exchange, and what to do; "" where nothing does."""
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
    """`layer.weight` for `module._orig_mod.layer.weight`."""
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def trained_tables(model: nn.Module) -> set[str]:
    """Names of the trained embeddings and of the output layer, as `trained_parameters` spells them."""
    return {plain_name(name) for name in tables_of(model)}


def trained_specs(model: nn.Module) -> list[TensorSpec]:
    """Names and shapes of the parameters that are trained, and which are tables."""
    tables = trained_tables(model)
    return [TensorSpec(name, tuple(as_real(param).shape), name in tables) for name, param in trained_parameters(model)]


Exempt = str | Callable[[str, nn.Parameter], bool] | None
WORDS = ("norm", "bias", "embedding")


def exempt_names(exempt: Exempt, model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are never compressed.

    Args:
        exempt: words, such as `norm,bias`: parameters of normalisation layers, biases, embeddings; or a function of
            name and parameter that says whether one is exempt; None = none.
        model: whose parameters.

    Raises:
        ConfigError: a word is unknown, it is neither, or the function raises an error.
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
    found = {  # a parameter that several modules share has the name that it has in the first one
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

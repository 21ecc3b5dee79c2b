"""Triton's interpreter without what it repeats for each operation: patches of its language, and equal types and shapes.

It runs a kernel as Python code on NumPy arrays. For each launch and each call of a device function it searches the
language's modules for functions to patch, and for each operation it builds the type and the shape of the result, which
takes more time than the arithmetic. `prepared` patches once, and keeps what is built from equal arguments; results are
the same.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Run kernels faster within; versions of Triton whose interpreter is written in another way run as they are."""
    import triton.language as tl
    from triton.runtime import interpreter

    core = tl.core
    known = hasattr(interpreter, "_LangPatchScope") and {"handle", "type"} <= {
        *inspect.signature(core.tensor).parameters
    }
    if not known:
        yield
        return
    with contextlib.ExitStack() as scopes, pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", _patching_once(interpreter, [tl, core], scopes))
        patched.setattr(interpreter, "_get_np_dtype", _kept_dtypes(interpreter, core))
        patched.setattr(core.block_type, "__init__", _kept_types(core))
        patched.setattr(core.tensor, "__init__", _kept_shapes(core))
        yield


def _patching_once(interpreter: Any, modules: list[Any], scopes: contextlib.ExitStack) -> Callable[[Any], Any]:
    """Patch what a function sees of the language, unless a function before has seen it; undo all at the end."""
    patch, done, unpatched = interpreter._patch_lang, set(), interpreter._LangPatchScope()
    seen = set()

    def once(fn: Any) -> Any:
        if fn not in seen:
            seen.add(fn)
            own = {modules.index(value) for value in fn.__globals__.values() if any(value is m for m in modules)}
            if not own <= done:
                done.update(own)
                scopes.callback(patch(fn).restore)
        return unpatched

    return once


def _kept_dtypes(interpreter: Any, core: Any) -> Callable[[Any], Any]:
    """Look up NumPy's dtype of each scalar type once."""
    find, kept = interpreter._get_np_dtype, {}

    def found(of: Any) -> Any:
        if type(of) is not core.dtype:
            return find(of)
        if of.name not in kept:
            kept[of.name] = find(of)
        return kept[of.name]

    return found


def _kept_types(core: Any) -> Callable[..., None]:
    """Give a block type the attributes of an equal one."""
    build, kept = core.block_type.__init__, {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        given = shape.values if type(shape) is core.tuple else core._unwrap_if_constexpr(shape)
        key = element_ty.name, *[n if type(n) is int else core._unwrap_if_constexpr(n) for n in given]
        if type(element_ty) is not core.dtype:
            build(self, element_ty, shape)
        elif key in kept:
            self.__dict__.update(kept[key])
        else:
            build(self, element_ty, shape)
            kept[key] = dict(self.__dict__)

    return init


def _kept_shapes(core: Any) -> Callable[..., None]:
    """Give a tensor the shape and the number of elements of a tensor of an equal type before."""
    build, kept = core.tensor.__init__, {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = type.shape if type.is_block() else None
        key = key if key is None else (*key.values,)
        if key not in kept:
            build(self, handle, type)
            kept[key] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = kept[key]

    return init

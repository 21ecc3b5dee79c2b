"""How kernels are compiled, and how they reach memory.

Without fast arithmetic: an expression is rounded where it is written, so that codes equal those of torch to the bit.
Sums alone may be taken in any order (`summing`), the same one on every machine of a kind. Machine code is kept on disk,
where numba keeps it: in NUMBA_CACHE_DIR, beside these files, or else in the user's cache.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

u8, u32, u64, i64, f32, f64 = np.uint8, np.uint32, np.uint64, np.int64, np.float32, np.float64


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A loop as machine code; it runs beside other threads."""
    return _kept(loop, nogil=True, error_model="numpy")


def summing(loop: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and its sums may be taken in any order."""
    return _kept(loop, nogil=True, error_model="numpy", fastmath={"reassoc"})


def _kept(loop: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # numba compiles anew where a loop's own file changes; machine code also holds what the loop calls and the constants
    # it takes from elsewhere, so all of these files are in the name that it is kept under
    loop.__qualname__ += f"_{digest(Path(__file__).parents[1])}"
    try:
        return numba.njit(loop, cache=True, **options)
    except RuntimeError:  # no folder can be written
        return numba.njit(loop, **options)


@functools.cache
def digest(folder: Path) -> str:
    """Of all Python files in a folder and those below, 12 hexadecimal digits."""
    contents = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        contents.update(file.read_bytes())
    return contents.hexdigest()[:12]


@intrinsic
def _pointer(context: Any, address: Any, like: Any) -> Any:
    def inttoptr(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), inttoptr


@compiled
def array_at(address, n, like):  # type: ignore[no-untyped-def]
    """The n numbers at an address, of the type of the array `like`."""
    return numba.carray(_pointer(address, like), (n,))


@compiled
def owner(rows, column, number, t):  # type: ignore[no-untyped-def]
    """The tensor that bucket, tile or piece `number` is of, looked for from tensor t on."""
    if number < rows[t, column]:
        t = 0
    while number >= rows[t + 1, column]:
        t += 1
    return t


@intrinsic
def bits_of(context: Any, x: Any) -> Any:
    """The bits of a float32, as uint32."""

    def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), bitcast


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """The float32 of some bits."""

    def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), bitcast

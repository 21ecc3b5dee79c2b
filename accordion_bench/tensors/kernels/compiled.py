"""Compilation of kernels by numba, and access to memory by address.

Kernels are compiled without fast arithmetic, so that codes equal those of torch bit for bit. Only sums may be reordered
(`summing`); the order is the same on all machines of one kind. numba caches machine code on disk: in NUMBA_CACHE_DIR,
beside these files, or in the user's cache.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

u8, u32, u64, i64, f32, f64 = np.uint8, np.uint32, np.uint64, np.int64, np.float32, np.float64


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop to machine code that releases the GIL."""
    return _kept(loop, nogil=True, error_model="numpy")


def summing(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Compile as `compiled`, and allow sums in any order."""
    return _kept(loop, nogil=True, error_model="numpy", fastmath={"reassoc"})


def _kept(loop: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # numba recompiles a loop if its own file changes; but machine code also contains called loops and the constants
    # it takes from elsewhere, so all of these files are in the name that it is kept under
    loop.__qualname__ += f"_{digest(Path(__file__).parents[1])}"
    try:
        return numba.njit(loop, cache=True, **options)
    except RuntimeError:  # no folder can be written
        return numba.njit(loop, **options)


@functools.cache
def digest(folder: Path) -> str:
    """Return a hash of all Python files in a folder and its subfolders, 12 hexadecimal digits."""
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
    """Return the array of n elements at an address, with the dtype of the array `like`."""
    return numba.carray(_pointer(address, like), (n,))


@compiled
def owner(rows, column, number, t):  # type: ignore[no-untyped-def]
    """Return the tensor of bucket, tile or piece `number`, by a search from tensor t on."""
    if number < rows[t, column]:
        t = 0
    while number >= rows[t + 1, column]:
        t += 1
    return t


@intrinsic
def bits_of(context: Any, x: Any) -> Any:
    """Return the bits of a float32 as uint32."""

    def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), bitcast


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""

    def bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), bitcast


@intrinsic
def zeros_below(context: Any, word: Any) -> Any:
    """Return the number of trailing zeros of a uint64."""

    def count(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], cgutils.false_bit)

    return types.uint64(types.uint64), count


@intrinsic
def ones(context: Any, word: Any) -> Any:
    """Return the number of ones of a uint64."""

    def count(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), count

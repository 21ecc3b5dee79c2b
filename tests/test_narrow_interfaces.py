"""How wide interfaces are: members of a compressor, traits, parameters of functions, file names; read from the code."""

import ast
import dataclasses
from collections import Counter
from pathlib import Path

from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.description import Traits

PACKAGE = Path(__file__).parents[1] / "accordion_bench"
FEW = 6  # parameters; more become an object
COMPILED = {"compiled", "jit"}  # a kernel takes numbers and arrays alone


def test_a_compressor_has_few_members_and_traits():
    assert len([name for name in dir(Compressor) if not name.startswith("_")]) <= 18
    assert len(dataclasses.fields(Traits)) <= 15


def test_no_compressor_asks_for_a_device():
    asking = [
        file.name
        for file in (PACKAGE / "compressors").glob("*.py")
        if "device.type" in (text := file.read_text()) or "on_device" in text
    ]
    assert asking == []


def test_few_functions_have_many_parameters():
    """Constructors take the options of a YAML, and `attach`, `local`, `advice` what a user may choose."""
    wide = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any(part in COMPILED for found in node.decorator_list for part in ast.unparse(found).split(".")):
                continue
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = len([name for name in given if name.arg not in ("self", "cls")])
            if count > FEW:
                wide.append(f"{file.relative_to(PACKAGE)}: {node.name} {count}")
    assert len(wide) < 40, "\n".join(wide)


def test_no_public_class_name_is_used_twice():
    names = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []

"""Text files are UTF-8, whatever the machine's language is."""

import ast
from pathlib import Path

from tests.kit.paths import ROOT

TEXT = {"read_text": 0, "write_text": 1}  # by the number of arguments before the encoding
OPENING = ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile")


def without_encoding(source: str) -> list[int]:
    """The lines in which a text file is opened without saying how it is written."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and not {word.arg for word in call.keywords} & {"encoding", None}:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if (name in TEXT and len(call.args) <= TEXT[name]) or (name in OPENING and _is_text(call, name)):
                found.append(call.lineno)
    return found


def _is_text(call: ast.Call, name: str) -> bool:
    """Whether a call opens a file for text; os.open and Image.open know no modes of text."""
    others = ("os", "opener", "Image", "tarfile", "files")
    if name != "fdopen" and isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in others:
        return False
    method = isinstance(call.func, ast.Attribute) and name == "open"
    place = 0 if method or name.endswith("File") else 1
    given = [word.value for word in call.keywords if word.arg == "mode"] + call.args[place : place + 1]
    default = "w+b" if name.endswith("File") else "r"
    mode = given[0].value if given and isinstance(given[0], ast.Constant) else default
    return "b" not in str(mode)


def test_every_text_file_is_opened_as_utf_8():
    files = [*Path(ROOT, "accordion_bench").rglob("*.py"), *Path(ROOT, "scripts").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): without_encoding(file.read_text(encoding="utf-8")) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_the_search_finds_what_it_looks_for():
    found = ("p.read_text()", "p.write_text(x)", "open(f)", "open(f, 'a')", "p.open('w')", "p.open()", "os.fdopen(d)")
    fine = (
        "p.read_text('utf-8')",
        "p.read_text(encoding='x')",
        "open(f, 'rb')",
        "p.open('wb')",
        "os.open(f, 1)",
        "f()",
    )
    assert all(without_encoding(text) for text in found)
    assert not any(without_encoding(text) for text in fine)

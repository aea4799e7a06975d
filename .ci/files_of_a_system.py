"""Prints the files whose types may differ between Linux and macOS: they ask for the system, or use a name that the
standard library has on one of the two."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import basedpyright

STUBS = Path(basedpyright.__file__).parent / "dist" / "typeshed-fallback" / "stdlib"
FOLDERS = ("protocol", "draft_worker", "target_worker", "orchestrator", "tests", "docs")


def names(stub: str) -> Iterator[str]:
    for block in ast.walk(ast.parse(stub if "sys.platform" in stub else "")):
        if isinstance(block, ast.If) and re.search("sys.platform.*(linux|darwin)", ast.unparse(block.test)):
            for node in ast.walk(block):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    yield node.name
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id


asked = {"sys": r"sys\.platform"}
for file in STUBS.rglob("*.pyi"):
    # The stub of a package is its __init__, and socket has the names of _socket.
    module = ".".join(file.relative_to(STUBS).with_suffix("").parts).removesuffix(".__init__").lstrip("_")
    if found := "|".join(sorted(set(names(file.read_text())))):
        theirs = rf"\b{module}\.({found})\b|from _?{module} import [^\n]*\b({found})\b"
        asked[module] = "|".join(filter(None, (asked.get(module), theirs)))
for file in (file for folder in FOLDERS for file in Path(folder).rglob("*.py")):
    program = file.read_text()
    if any(module in program and re.search(pattern, program) for module, pattern in asked.items()):
        print(file)

"""The order of the package's modules."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import inplace_abn

PACKAGE = Path(inplace_abn.__file__).parent
FOLDERS = [path.name for path in PACKAGE.iterdir() if path.is_dir()]


def imported(path):
    """Yields the modules of the package that a file imports, at its top or later. A folder counts as one module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            package, *names = node.module.split(".")
            if package == PACKAGE.name:
                yield from names[:1] or (alias.name for alias in node.names)


def test_no_module_or_folder_imports_one_that_imports_it():
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        graph.setdefault(first, set()).update(set(imported(path)) - {first})
    assert set(FOLDERS) - {"__pycache__"} < graph.keys()
    assert len(graph["conversion"]) > 5
    TopologicalSorter(graph).prepare()

"""The syntax trees of source files, for tests that read the source."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def syntax_trees(*folders: Path) -> list[tuple[Path, ast.Module]]:
    """Parse every Python file below some folders.

    The trees have millions of nodes, and nothing of them is garbage. The collector waits meanwhile, because it would
    take four fifths of the time.
    """
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    gc.disable()
    try:
        trees = [(path, ast.parse(path.read_text("utf-8"), str(path))) for path in paths]
        gc.freeze()
    finally:
        gc.enable()
    return trees

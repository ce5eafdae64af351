"""A notebook as a page: its text as it is, its code as blocks of Python."""

from __future__ import annotations

from typing import Any


def markdown_of(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook as Markdown.

    Args:
        notebook: The notebook, as nbformat 4 stores it.
    """
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"

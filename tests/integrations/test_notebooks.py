"""The notebooks of docs/notebooks run from their first cell to their last, and are stored without what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

BOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def run(path: Path, folder: Path) -> list[Any]:
    """Execute a notebook in a folder; return the outputs of all cells."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    NotebookClient(book, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in book.cells for output in cell.get("outputs", ())]


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.filterwarnings("default")
def test_the_quickstart_ingests_asks_and_compares(tmp_path: Path) -> None:
    text = printed(run(BOOKS[0], tmp_path))
    assert "Ada Brook" in text
    assert text.index("full   1921") < text.index("reuse  1921") < text.index("scout  1921")
    assert not list(tmp_path.iterdir()), "the data folder is a temporary one"


@pytest.mark.filterwarnings("default")
def test_what_is_selected_is_printed_and_drawn(tmp_path: Path) -> None:
    outputs = run(BOOKS[1], tmp_path)
    assert "Aldous Finch" in printed(outputs)
    assert "of 18 blocks kept" in printed(outputs)
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 2


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_without_outputs(path: Path) -> None:
    assert path.stat().st_size < 20_000
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)

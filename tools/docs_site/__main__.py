"""`python -m tools.docs_site FOLDER` writes the pages of the site into FOLDER, which mkdocs.yml names.

The pages of docs/ are plain Markdown, which a code host shows as well. What only the site can show is made here: the
reference of the Python code and of the HTTP API, the notebooks as pages, and pages that lie outside of docs/. The
result is plain Markdown again, so no program that builds sites needs a plug-in of ours.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from tools.docs_site.links import OUTSIDE, site_links
from tools.docs_site.notebook import markdown_of
from tools.docs_site.openapi import read_schema, reference_of
from tools.docs_site.python_reference import CLIENT, ENGINE, python_page

ROOT = Path(__file__).resolve().parents[2]


def pages() -> dict[str, str]:
    """Return the Markdown of every page of the site, by its path in the site."""
    docs = ROOT / "docs"
    found = {path.relative_to(docs).as_posix(): path.read_text("utf-8") for path in sorted(docs.rglob("*.md"))}
    found |= {site: (ROOT / source).read_text("utf-8") for source, site in OUTSIDE.items()}
    for path in sorted(docs.rglob("*.ipynb")):
        page = path.relative_to(docs).with_suffix(".md").as_posix()
        found[page] = markdown_of(json.loads(path.read_text("utf-8")))
    found |= {
        "reference/client.md": python_page("The Python client", CLIENT),
        "reference/engine.md": python_page("The engine", ENGINE),
        "reference/http.md": reference_of(read_schema()),
    }
    return {page: site_links(page, text, found.keys()) for page, text in found.items()}


def write(folder: Path) -> None:
    """Write pages, pictures and the OpenAPI document.

    Args:
        folder: Where to write. What was there before is removed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.ipynb", ".*", "__pycache__"))
    for page, text in pages().items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    schema = json.dumps(read_schema(), indent=1, ensure_ascii=False)
    (folder / "reference" / "openapi.json").write_text(schema, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

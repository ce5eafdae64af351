"""Pages of the documentation site that are made of code: they need none of the packages that build the site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.docs_site.__main__ import pages, write
from tools.docs_site.links import OUTSIDE, site_links
from tools.docs_site.notebook import markdown_of
from tools.docs_site.openapi import read_schema, reference_of, type_of
from tools.docs_site.python_reference import CLIENT, ENGINE, python_page

PAGES = {"api.md", "results/cpu.md", "models/tiny.md", "notebooks/quickstart.md"}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return read_schema()


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("settings.md", "[a](api.md#errors)", "[a](api.md#errors)"),
        ("results/cpu.md", "[a](../api.md)", "[a](../api.md)"),
        ("results/cpu.md", "[card](../../models/tiny/README.md)", "[card](../models/tiny.md)"),
        ("models/tiny.md", "[a](../../docs/results/cpu.md)", "[a](../results/cpu.md)"),
        ("index.md", "[a](notebooks/quickstart.ipynb)", "[a](notebooks/quickstart.md)"),
        ("tuning.md", "see [the rules](../ragkv/evaluation/questions.py).", "see the rules."),
        ("index.md", "![a](images/paths.svg)", "![a](images/paths.svg)"),
        ("index.md", "[a](https://semver.org)", "[a](https://semver.org)"),
        ("index.md", "`[a](../tools/gpu.py)`", "`[a](../tools/gpu.py)`"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_become_text(page: str, link: str, expected: str) -> None:
    assert site_links(page, link, PAGES) == expected


def test_a_link_to_a_page_that_is_missing_stays_so_that_the_build_finds_it() -> None:
    assert site_links("index.md", "[a](nowhere.md)", PAGES) == "[a](nowhere.md)"


def test_a_notebook_becomes_prose_and_blocks_of_code() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text."]},
        {"cell_type": "code", "source": ["x = 1\n", "x"]},
    ]
    assert markdown_of({"cells": cells}) == "# Title\nText.\n\n```python\nx = 1\nx\n```\n"


def test_the_http_reference_has_every_route_and_every_object(schema: dict[str, Any]) -> None:
    page = reference_of(schema)
    routes = [f"### {method.upper()} {path}\n" for path, methods in schema["paths"].items() for method in methods]
    assert len(routes) > 25
    assert not [route for route in routes if page.count(route) != 1]
    assert not [name for name in schema["components"]["schemas"] if f"### {name}\n" not in page]
    answer = page.partition("### POST /v1/answers\n")[2].partition("\n### ")[0]
    assert "Body, `application/json`: [QuestionIn](#questionin)" in answer
    assert "| `200` | The answer | `application/json`: [Answer](#answer); `text/event-stream`: events |" in answer
    assert "`504`" in answer
    assert "| `question` | string, length ≥ 1" in page
    assert "| `limit` | query | integer, ≥ 1, ≤ 100 | `20` |  |" in page
    assert "| `document_id` | path | string, length ≥ 1, length ≤ 512 | yes |  |" in page


def test_types_of_the_http_reference_read_as_words() -> None:
    assert type_of({"type": "array", "items": {"$ref": "#/components/schemas/Mark"}}) == "list of [Mark](#mark)"
    assert type_of({"anyOf": [{"type": "string"}, {"type": "null"}]}) == "string or null"
    assert type_of({"enum": ["asc", "desc"]}) == '`"asc"` or `"desc"`'
    assert type_of({"type": "object", "additionalProperties": {"type": "integer"}}) == "object of integer"
    assert type_of({}) == "any JSON value"


def test_the_schema_does_not_depend_on_the_settings_of_whoever_builds(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_API_KEYS", "acme=" + "0" * 64)
    assert read_schema() == schema


@pytest.mark.parametrize("sections", [CLIENT, ENGINE])
def test_the_python_reference_names_objects_that_exist(sections: dict[str, tuple[str, ...]]) -> None:
    import pkgutil

    for names in sections.values():
        for name in names:
            assert pkgutil.resolve_name(name) is not None
            assert f"\n::: {name}\n" in python_page("The engine", sections)


def test_the_site_is_written_with_pictures_and_without_notebooks(tmp_path: Path, root: Path) -> None:
    folder = tmp_path / "site"
    (folder / "stale").mkdir(parents=True)
    write(folder)
    assert not (folder / "stale").exists()
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(pages()) | {"images/stored.svg", "reference/openapi.json"} <= written
    assert {*OUTSIDE.values(), "notebooks/selected.md", "reference/http.md"} <= written
    assert not [name for name in written if name.endswith(".ipynb")]
    assert json.loads((folder / "reference" / "openapi.json").read_text())["info"]["title"] == "ragkv"

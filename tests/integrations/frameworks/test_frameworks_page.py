"""The examples of docs/frameworks.md print what the page says. Its documents are two of the service's (conftest.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

for package in ("langchain_core", "llama_index.core", "haystack"):
    pytest.importorskip(package)

pytestmark = pytest.mark.integrations

URL = "http://127.0.0.1:8000"


def test_every_example_prints_what_the_page_says(service, root: Path, capsys) -> None:
    page = (root / "docs" / "frameworks.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(examples) == 7
    for example in examples:
        assert URL in example
        exec(compile(example.replace(URL, service.url), "example", "exec"), {"__name__": "example"})
        said = re.findall(r"\)  # (.+)$", example, re.M)
        assert [line.strip() for line in capsys.readouterr().out.splitlines()] == said

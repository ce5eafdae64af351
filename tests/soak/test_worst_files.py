"""The twenty files of two megabytes that cost the most are refused or stored, and the service answers meanwhile."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.api.test_worst_files import ingest_worst
from tests.program import served

SIZE = 2 * 2**20
WORST = (
    *("one-cell.csv", "one-row.csv", "backticks.md", "brackets.md", "links.md", "emphasis.md", "quotes.md"),
    *("heading.md", "no-spaces.txt", "spaces.txt", "lines.txt", "ideographs.txt", "marks.txt", "nested.html"),
    *("spans.html", "entities.html", "cells.xlsx", "paragraphs.docx", "missing.pptx", "nested.eml", "line.jsonl"),
)
STALL = 0.5
"""Seconds in which `/healthz` answers, always."""
BUDGET = 30.0 + 2 * 30.0
"""Seconds that parsing a file of this size and splitting its text may take."""
ENCODING = 15.0
"""Seconds of encoding, which is in proportion to the text, after which a file is removed."""
WHOLE = ("heading.md", "lines.txt")
"""Files that are encoded to their end: they have the fewest tokens."""


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_the_worst_files_of_two_megabytes_stall_nobody(tmp_path: Path, root: Path) -> None:
    ended = []
    with served(
        tmp_path, RAGKV_MODEL=str(root / "models/tiny"), RAGKV_CHUNK_TOKENS="1024", RAGKV_DASHBOARD="false"
    ) as (_, client):
        others = [name for name in WORST if name not in WHOLE]
        files = (ingest_worst(client, WHOLE, SIZE, BUDGET), ingest_worst(client, others, SIZE, BUDGET, ENCODING))
        for item in itertools.chain(*files):
            print(
                f"\n{item.name:16} {item.size:8} bytes  {item.outcome:16} {item.chunks:5} chunks  "
                f"{item.seconds:6.1f} s  longest stall {1000 * item.stall:5.0f} ms  {item.message[:90]}",
                end="",
                flush=True,
            )  # seen with -s
            ended.append(item)
    assert {item.outcome for item in ended if item.name in WHOLE} == {"completed"}
    assert {item.outcome for item in ended} <= {"completed", "cancelled", "too_large", "invalid_document"}
    assert max(item.stall for item in ended) < STALL, ended

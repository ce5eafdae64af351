"""What parsing takes grows with the file, and not with its square: each case is parsed at two sizes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ragkv.errors import TooLarge
from ragkv.ingest.formats import docx, eml, html, pptx, xlsx
from ragkv.ingest.formats.base import Parsed
from ragkv.ingest.formats.pdf_lines import flow
from tests.ingest.formats import files, packages
from tests.ingest.worst_files import slides_of_one_part, slides_without_parts

LIMIT = 1 << 30
GROWTH = 4
MOST = 9.0
"""Most times as long that a file of GROWTH times the size may take. Quadratic work takes 16 times as long."""


def seconds(parse: Callable[[], object]) -> float:
    """Processor time, the least of three."""
    taken = []
    for _ in range(3):
        started = time.thread_time()
        parse()
        taken.append(time.thread_time() - started)
    return min(taken)


def styles(size: int) -> bytes:
    """Each style is based on the next one."""
    chain = (f'<w:style w:styleId="s{at}"><w:basedOn w:val="s{at + 1}"/></w:style>' for at in range(size))
    return files.docx(files.paragraph("a"), styles="".join(chain))


def nested_rows(size: int) -> bytes:
    """A row in each cell of a row."""
    cell = f"<w:tr><w:tc>{files.paragraph('The harbour of Tarn.')}"
    return files.docx(cell * size + "</w:tc></w:tr>" * size)


def formats(size: int) -> bytes:
    """Many cell styles of one long number format."""
    code = f'<numFmts><numFmt numFmtId="200" formatCode="{"0" * 10 * size}"/></numFmts>'
    used = '<xf numFmtId="200"/>' * size
    return packages.xlsx({"S": packages.row("a")}, styles=f"{code}<cellXfs>{used}</cellXfs>")


def words(size: int) -> bytes:
    """A subject without end."""
    return b"Subject: " + b"word " * size + b"\n\nThe harbour."


CASES: dict[str, tuple[Callable[[bytes, int], Parsed], Callable[[int], bytes], int]] = {
    "slides that are missing": (pptx.parse, slides_without_parts, 40_000),
    "a slide again and again": (pptx.parse, slides_of_one_part, 100_000),
    "a chain of styles": (docx.parse, styles, 1000),
    "rows in rows": (docx.parse, nested_rows, 1000),
    "a long number format": (xlsx.parse, formats, 1000),
    "a long header": (eml.parse, words, 40_000),
}


@pytest.mark.parametrize("name", CASES)
def test_parsing_takes_time_in_proportion_to_the_file(name: str) -> None:
    parse, make, size = CASES[name]
    small, large = make(size), make(GROWTH * size)

    def run(data: bytes) -> Callable[[], object]:
        return lambda: parse(data, LIMIT)

    assert seconds(run(large)) < MOST * max(seconds(run(small)), 0.002)


def test_a_part_that_is_named_again_is_read_once() -> None:
    twice = {"xl/_rels/workbook.xml.rels": packages.links(*[("worksheet", "worksheets/s0.xml")] * 2)}
    book = packages.xlsx({"A": packages.row("The harbour."), "B": ""}, **twice)
    assert xlsx.parse(book, LIMIT).text == "## A\n\nThe harbour."


def test_joining_lines_of_a_page_takes_time_in_proportion_to_them() -> None:
    small, large = "and so on\n" * 20_000, "and so on\n" * 80_000
    assert seconds(lambda: flow(large)) < MOST * seconds(lambda: flow(small))


@pytest.mark.parametrize(
    ("page", "joined"),
    [
        ("The har-\nbour\nof Tarn.\nthen", "The harbour of Tarn.\nthen"),
        ("A\nb\nc-\nd", "A b cd"),
        ("The ha-\nr-\nbour", "The harbour"),
        ("one\n\ntwo", "one\n\ntwo"),
        ("a-\nb", "ab"),
        ("A-\nb", "A-b"),
    ],
)
def test_lines_of_a_page_are_joined(page: str, joined: str) -> None:
    assert flow(page) == joined


def test_elements_in_elements_without_end_are_refused() -> None:
    html.parse(b"<div>" * html.MOST_NESTED + b"deep", LIMIT)
    with pytest.raises(TooLarge, match="over 10000 of its elements are open"):
        html.parse(b"<div>" * (html.MOST_NESTED + 1) + b"deep", LIMIT)


def test_elements_that_end_by_themselves_are_not_counted() -> None:
    count = 2 * html.MOST_NESTED
    page = b"<p>a<br><b>c</b>" * count + b"<table>" + b"<tr><td>d" * count
    assert html.parse(page, LIMIT).text.startswith("a\nc\n\na\nc")

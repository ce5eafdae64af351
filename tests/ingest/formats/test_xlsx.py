"""Workbooks: rows keep the names of their columns, values read as they are shown, and bombs are refused."""

from __future__ import annotations

import pytest

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.package import UNPACKED_BYTES
from ragkv.ingest.formats.xlsx import parse
from tests.ingest.formats.files import archive
from tests.ingest.formats.packages import cell, row, xlsx
from tests.ingest.formats.test_docx import BILLION

LIMIT = 100_000
STYLES = """<numFmts><numFmt numFmtId="164" formatCode="dd/mm/yyyy"/><numFmt numFmtId="165" formatCode="0.0%"/>
    <numFmt numFmtId="166" formatCode='#,##0 "days"'/><numFmt numFmtId="167" formatCode="General"/></numFmts>
    <cellStyleXfs><xf numFmtId="14"/></cellStyleXfs>
    <cellXfs><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="164"/><xf numFmtId="165"/><xf numFmtId="166"/>
    <xf numFmtId="167"/><xf numFmtId="21"/></cellXfs>"""


def text(rows: str, **more: str) -> str:
    return parse(xlsx({"S": rows}, styles=STYLES, **more), LIMIT).text.removeprefix("## S\n\n")  # type: ignore[arg-type]


def test_rows_are_paragraphs_and_sheets_are_headings() -> None:
    sheets = {"Ships": row("Name", "Built") + row("Ada", 1890) + row("Ben", 1.5), "Ports": row("Tarn") + row("Mell")}
    parsed = parse(xlsx(sheets), LIMIT)
    assert parsed.text == "## Ships\n\nName: Ada\nBuilt: 1890\n\nName: Ben\nBuilt: 1.5\n\n## Ports\n\nTarn\n\nMell"
    assert parsed.pages == (), "a sheet has a name and no number"
    assert parsed.metadata == {"format": "xlsx", "sheets": 2}


def test_lines_above_a_table_are_paragraphs_and_numbers_name_no_columns() -> None:
    assert text(row("All ships") + row("Name", "Built") + row("Ada", 1890)) == "All ships\n\nName: Ada\nBuilt: 1890"
    assert text(row(1, 2) + row(3)) == "column 1: 1\ncolumn 2: 2\n\ncolumn 1: 3"


def test_cells_stand_where_their_reference_says() -> None:
    rows = row(cell("Name", at="B2"), cell("Port", at="AA2")) + row(
        cell("Ada", at="B3"), cell("x", at="C3"), cell("Tarn", at="AA3")
    )
    assert text(rows) == "Name: Ada\ncolumn 3: x\nPort: Tarn"


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (cell(36283, 1), "1999-05-03"),
        (cell(36283.5, 2), "1999-05-03 12:00:00"),
        (cell(0.5625, 6), "13:30:00"),
        (cell(0.255, 3), "25.5%"),
        (cell(12, 4), "12 days"),
        (cell(36283, 5), "36283"),
        (cell(0.1 + 0.2), "0.3"),
        (cell(1e20), "1e+20"),
        (cell(99999999999, 1), "99999999999"),
        (cell(-5, 1), "-5"),
        (cell("nan", 1, "n"), "nan"),
        (cell(1, 99), "1"),
        (cell(1, kind="b"), "TRUE"),
        (cell(0, kind="s"), "shared text"),
        (cell(7, kind="s"), ""),
        (cell("result", kind="str"), "result"),
        (cell("2019-05-03T00:00:00.000", 1, "d"), "2019-05-03"),
        (cell("2019-05-03T12:30:00Z", 1, "d"), "2019-05-03 12:30:00"),
        (cell("#N/A", kind="e"), ""),
        ('<c><f>A1+A2</f><v>3</v></c>', "3"),
        (cell("two\n\nlines"), "two\nlines"),
    ],
)  # fmt: skip
def test_values_read_as_they_are_shown(made: str, shown: str) -> None:
    strings = ["<r><t>shared </t></r><r><t>text</t></r><rPh><t>GONE</t></rPh>"]
    parsed = parse(xlsx({"S": row("only") + row(made)}, strings, STYLES), LIMIT)
    assert parsed.text == "\n\n".join(part for part in ("## S", "only", shown) if part)


def test_dates_count_from_1904_where_the_workbook_says_so() -> None:
    made = xlsx({"S": row(cell(0, 1)) + row(cell(1, 1))}, styles=STYLES, properties='<workbookPr date1904="1"/>')
    assert parse(made, LIMIT).text.split("\n\n")[2] == "1904-01-02"


def test_hidden_sheets_and_rows_and_macros_are_left_out() -> None:
    sheets = {"!Hidden": row("GONE"), "S": row("kept") + row("GONE", more=' hidden="1"')}
    parsed = parse(xlsx(sheets, **{"xl/vbaProject.bin": b"\xd0\xcf\x11\xe0 Shell"}), LIMIT)
    assert parsed.text == "## S\n\nkept"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"text", "no Excel workbook"),
        (archive({"a.txt": b"a"}), "another archive"),
        (xlsx({"S": row("a")})[:-30], "no Excel workbook"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, r"old \.xls; save it as \.xlsx"),
        (xlsx({"S": "<row>"}), "damaged"),
        (xlsx({"S": ""}, **{"xl/styles.xml": f"{BILLION}<l>&j;</l>".encode()}), "document type"),
    ],
)
def test_other_files_are_refused_with_a_reason(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        parse(data, LIMIT)


def test_bombs_are_too_large() -> None:
    with pytest.raises(TooLarge, match="its text has over 100000 bytes"):
        parse(xlsx({"S": row(cell(0, kind="s")) * 200}, ["<t>" + "a" * 1000 + "</t>"]), LIMIT)
    with pytest.raises(TooLarge, match=r"styles\.xml have over"):
        parse(xlsx({"S": ""}, styles=" " * (UNPACKED_BYTES + 1)), LIMIT)


def test_a_cell_at_the_far_end_of_each_row_costs_no_more_than_another() -> None:
    rows = row("a", cell("b", at="XFD1")) + row(cell("x", at="XFD2")) * 3000
    assert text(rows).count("b: x") == 3000

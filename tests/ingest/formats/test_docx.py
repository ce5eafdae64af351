"""Word documents: all printed text is read in order; other archives and bombs are refused."""

from __future__ import annotations

import pytest

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.docx import parse
from ragkv.ingest.formats.package import UNPACKED_BYTES
from tests.ingest.formats.files import STRICT, archive, docx, paragraph, table

LIMIT = 100_000
STYLES = """<w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>
    <w:style w:styleId="Mine"><w:name w:val="Mine"/><w:basedOn w:val="berschrift1"/></w:style>
    <w:style w:styleId="Level"><w:name w:val="Level"/><w:pPr><w:outlineLvl w:val="2"/></w:pPr></w:style>
    <w:style w:styleId="ListBullet"><w:name w:val="List Bullet"/><w:pPr><w:numPr/></w:pPr></w:style>
    <w:style w:styleId="Loop"><w:name w:val="Loop"/><w:basedOn w:val="Pool"/></w:style>
    <w:style w:styleId="Pool"><w:name w:val="Pool"/><w:basedOn w:val="Loop"/></w:style>"""


def blocks(body: str, styles: str = STYLES, **parts: str) -> list[str]:
    return parse(docx(body, styles=styles, **parts), LIMIT).text.split("\n\n")


@pytest.mark.parametrize("space", [{}, {"space": STRICT}])
def test_headings_paragraphs_lists_and_tables_keep_their_shape(space: dict[str, str]) -> None:
    body = (
        paragraph("Prices", "berschrift1") + paragraph("Tea & cake.") + paragraph("Today", "Mine")
        + paragraph("Late", "Level") + paragraph("Early", more='<w:outlineLvl w:val="1"/>')
        + paragraph("one", "ListBullet") + paragraph("two", more="<w:numPr/>") + paragraph("on", "Loop")
        + table(("Item", "Price"), ("Tea", "2"), ("", ""), ("Cake", ""))
    )  # fmt: skip
    parsed = parse(docx(body, styles=STYLES, **space), LIMIT)
    assert parsed.text.split("\n\n") == [
        "# Prices", "Tea & cake.", "# Today", "### Late", "## Early", "- one\n- two", "on",
        "Item | Price\nTea | 2", "Cake",
    ]  # fmt: skip
    assert parsed.metadata == {"format": "docx"}


def test_the_title_comes_from_the_properties_or_the_first_heading() -> None:
    body = paragraph("text") + paragraph("Head", "berschrift1")
    assert parse(docx(body, title=" The \n yard", styles=STYLES), LIMIT).title == "The yard"
    assert parse(docx(body, styles=STYLES), LIMIT).title == "Head"
    assert parse(docx(paragraph("text")), LIMIT).title == ""


def test_breaks_and_tabs_are_white_space() -> None:
    run = "<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t><w:noBreakHyphen/><w:t>d</w:t></w:r></w:p>"
    assert blocks(run) == ["a b\nc-d"]


def test_tracked_changes_read_as_accepted() -> None:
    changed = """<w:p><w:r><w:t xml:space="preserve">kept </w:t></w:r><w:ins><w:r><w:t>inserted</w:t></w:r></w:ins>
        <w:del><w:r><w:delText>GONE</w:delText></w:r></w:del><w:moveFrom><w:r><w:t>GONE</w:t></w:r></w:moveFrom></w:p>"""
    assert blocks(changed) == ["kept inserted"]


def test_hidden_text_and_fields_are_not_read() -> None:
    body = """<w:p><w:r><w:rPr><w:vanish/></w:rPr><w:t>GONE</w:t></w:r><w:r><w:instrText>GONE</w:instrText></w:r>
        <w:r><w:rPr><w:vanish w:val="false"/></w:rPr><w:t>kept</w:t></w:r></w:p>"""
    assert blocks(body) == ["kept"]


def test_content_controls_text_boxes_and_notes_are_read_once() -> None:
    control = f"<w:sdt><w:sdtContent>{paragraph('control')}</w:sdtContent></w:sdt>"
    box = f"<w:txbxContent>{paragraph('box')}</w:txbxContent>"
    drawn = f"<mc:AlternateContent><mc:Choice>{box}</mc:Choice><mc:Fallback>{box}</mc:Fallback></mc:AlternateContent>"
    body = f"{control}<w:p><w:r><w:t>before</w:t>{drawn}</w:r><w:r><w:t>after</w:t></w:r></w:p>"
    notes = f"<w:footnote>{paragraph('note')}</w:footnote>"
    assert blocks(body, footnotes=notes) == ["control", "box", "beforeafter", "note"]


# What is refused


BILLION = (
    '<!DOCTYPE l [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 10}">' for n in range(9))
    + "]>"
)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"text", "no Word document"),
        (b"PK\3\4" + b"\0" * 60, "no Word document"),
        (archive({"a.txt": b"a"}), "no Word document"),
        (archive({"word/document.xml": b"<workbook/>"}), "another one of an office"),
        (archive({"word/document.xml": b"<document><p>"}), "damaged"),
        (docx(paragraph("a"))[:-30], "no Word document"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, "password"),
        (docx("<w:p><w:r><w:t>&j;</w:t></w:r></w:p>", before=BILLION), "document type"),
        (docx("<w:p/>", before='<!DOCTYPE l SYSTEM "file:///etc/passwd">'), "document type"),
    ],
)
def test_other_files_are_refused_with_a_reason(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        parse(data, LIMIT)


def test_a_damaged_member_is_refused() -> None:
    data = bytearray(docx(paragraph("Tea and cake. " * 50)))
    at = data.index(b"word/document.xml") + 60
    data[at : at + 4] = bytes(byte ^ 0xFF for byte in data[at : at + 4])
    with pytest.raises(Exception, match=r"invalid|incorrect|Bad CRC|damaged"):
        parse(bytes(data), LIMIT)


def test_a_deflate_bomb_is_too_large_before_it_is_unpacked() -> None:
    bomb = docx(f"<w:p><w:r><w:t>{'a' * (50 << 20)}</w:t></w:r></w:p>")
    assert len(bomb) < LIMIT
    with pytest.raises(TooLarge, match="its text has over 100000 bytes"):
        parse(bomb, LIMIT)


def test_a_part_that_unpacks_to_no_text_is_too_large() -> None:
    bomb = docx("", styles=" " * (UNPACKED_BYTES + 1))
    with pytest.raises(TooLarge, match=r"styles\.xml have over"):
        parse(bomb, LIMIT)

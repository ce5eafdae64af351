"""Numbers of lists and headings of Word, and paragraphs that go on over a box, a large letter or a hidden end."""

from __future__ import annotations

import io
import zipfile

import pytest

from ragkv.ingest.formats import docx
from tests.ingest.formats import files, packages

LIMIT = 100_000


def item(text: str, level: int = 0, name: int = 1, more: str = "") -> str:
    number = f"<w:numPr><w:ilvl w:val='{level}'/><w:numId w:val='{name}'/></w:numPr>"
    return files.paragraph(text, more=number + more)


def level(at: int, kind: str, text: str, more: str = "") -> str:
    said = f"<w:start w:val='1'/><w:numFmt w:val='{kind}'/>{more}<w:lvlText w:val='{text}'/>"
    return f"<w:lvl w:ilvl='{at}'>{said}</w:lvl>"


def numbers(*levels: str, use: str = "", more: str = "") -> str:
    used = f"<w:num w:numId='1'><w:abstractNumId w:val='0'/>{use}</w:num>"
    return f"<w:abstractNum w:abstractNumId='0'>{''.join(levels)}</w:abstractNum>{more}{used}"


def document(body: str, numbering: str = "", styles: str = "") -> str:
    return docx.parse(files.docx(body, numbering=numbering, styles=styles), LIMIT).text


UPPER = level(0, "upperRoman", "Article %1.")
OVER = "<w:lvlOverride w:ilvl='0'><w:lvl w:ilvl='0'><w:numFmt w:val='lowerLetter'/><w:lvlText w:val='(%1)'/></w:lvl>"
LINKED = f"<w:abstractNum w:abstractNumId='5'><w:styleLink w:val='L'/>{level(0, 'upperLetter', '%1)')}</w:abstractNum>"


@pytest.mark.parametrize(
    ("numbering", "marks"),
    [
        (numbers(UPPER, level(1, "decimalZero", "%1.%2", "<w:isLgl/>")), "Article I.,1.01,1.02,Article II.,2.01"),
        (numbers(UPPER, level(1, "decimal", "%1.%2", "<w:isLgl/>")), "Article I.,1.1,1.2,Article II.,2.1"),
        (numbers(UPPER, level(1, "decimal", "§ %2", "<w:lvlRestart w:val='0'/>")),
         "Article I.,§ 1,§ 2,Article II.,§ 3"),
        (numbers(level(0, "ordinal", "%1"), level(1, "none", "%2-")), "1st,-,-,2nd,-"),
        (numbers(level(0, "cardinalText", "Part %1:"), level(1, "ordinalText", "%2:")),
         "Part One:,First:,Second:,Part Two:,First:"),
        (numbers(level(0, "decimal", "%1."), level(1, "bullet", "x"), use=f"{OVER}</w:lvlOverride>"), "(a),-,-,(b),-"),
        (numbers(level(0, "japaneseCounting", "%1、"), level(1, "decimalEnclosedCircle", "%2")), "一、,①,②,二、,①"),
        (numbers(level(0, "russianLower", "%1)"), level(1, "ideographTraditional", "%2.")), "а),甲.,乙.,б),甲."),
        (numbers(level(0, "decimal", "%1").replace("decimal'", "custom' w:format='001, 002, ...'")),
         "001,-,-,002,-"),
        (numbers("<w:numStyleLink w:val='L'/>", more=LINKED), "A),-,-,B),-"),
    ],
)  # fmt: skip
def test_items_have_the_numbers_that_word_shows(numbering: str, marks: str) -> None:
    body = item("x") + item("x", 1) + item("x", 1) + item("x") + item("x", 1)
    assert document(body, numbering) == "\n".join(f"{mark} x" for mark in marks.split(","))


def test_letters_of_items_are_repeated_behind_z() -> None:
    items = document("".join(map(item, "x" * 28)), numbers(level(0, "lowerLetter", "%1.")))
    assert items.endswith("\nz. x\naa. x\nbb. x")


def test_a_cell_may_hold_the_number_of_a_row_alone() -> None:
    rows = "".join(f"<w:tr><w:tc>{item('')}</w:tc><w:tc>{files.paragraph(text)}</w:tc></w:tr>" for text in ("a", "b"))
    assert document(f"<w:tbl>{rows}</w:tbl>", numbers(level(0, "decimal", "%1"))) == "1 | a\n2 | b"


def test_a_heading_has_the_list_of_the_style_that_it_is_based_on() -> None:
    styles = (
        "<w:style w:styleId='A'><w:name w:val='heading 1'/><w:pPr><w:numPr><w:numId w:val='1'/></w:numPr></w:pPr>"
        "</w:style><w:style w:styleId='B'><w:name w:val='heading 2'/><w:basedOn w:val='A'/>"
        "<w:pPr><w:numPr><w:ilvl w:val='1'/></w:numPr></w:pPr></w:style>"
    )
    body = files.paragraph("Yard", "A") + files.paragraph("Crane", "B")
    assert document(body, numbers(level(0, "decimal", "%1"), level(1, "decimal", "%1.%2")), styles) == (
        "# 1 Yard\n\n## 1.1 Crane"
    )


def test_an_item_that_was_taken_out_or_is_hidden_has_no_number() -> None:
    gone = item("", more="<w:rPr><w:del/></w:rPr>") + item("", more="<w:rPr><w:vanish/></w:rPr>")
    assert document(item("a") + gone + item("b"), numbers(level(0, "decimal", "%1."))) == "1. a\n2. b"
    body = item("a", more="<w:rPr><w:vanish/><w:specVanish/></w:rPr>") + files.paragraph("b")
    assert document(body, numbers(level(0, "decimal", "%1."))) == "1. a\n\nb"


def test_a_paragraph_goes_on_behind_a_box_and_a_large_letter() -> None:
    box = f"<w:r><w:txbxContent>{files.paragraph('box')}{files.table(['a', 'b'])}</w:txbxContent></w:r>"
    body = f"<w:p><w:r><w:t>lifts </w:t></w:r>{box}<w:r><w:t>40 t</w:t></w:r></w:p>"
    assert document(body) == "box\n\na | b\n\nlifts 40 t"
    heading = f"<w:p><w:pPr><w:outlineLvl w:val='0'/></w:pPr>{box}<w:r><w:t>Yard</w:t></w:r></w:p>"
    assert document(heading) == "box\n\na | b\n\n# Yard"
    letter = files.paragraph("T", more="<w:framePr w:dropCap='drop' w:lines='3'/>")
    assert document(letter + files.paragraph("he yard")) == "The yard"


def test_diagrams_are_read_behind_the_text() -> None:
    parts = files.docx(files.paragraph("text"), footnotes=f"<w:footnote>{files.paragraph('note')}</w:footnote>")
    with zipfile.ZipFile(io.BytesIO(parts)) as opened:
        read = {name: opened.read(name) for name in opened.namelist()}
    read["word/_rels/document.xml.rels"] = packages.links(("diagramDrawing", "diagrams/drawing1.xml"))
    drawn = f"<d:drawing xmlns:d='d' {packages.NAMES}>{packages.shape('Plan')}</d:drawing>"
    read["word/diagrams/drawing1.xml"] = drawn.encode()
    assert docx.parse(files.archive(read), LIMIT).text == "text\n\nPlan\n\nnote"
    read["word/_rels/document.xml.rels"] = packages.links(("diagramData", "diagrams/drawing1.xml"))
    assert docx.parse(files.archive(read), LIMIT).text == "text\n\nPlan\n\nnote"

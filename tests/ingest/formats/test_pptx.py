"""Presentations: every slide is read in order, and bombs are refused."""

from __future__ import annotations

import pytest

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.package import UNPACKED_BYTES
from ragkv.ingest.formats.pptx import parse
from tests.ingest.formats.files import archive, docx, paragraph
from tests.ingest.formats.packages import NAMES, STRICT_R, links, pptx, shape
from tests.ingest.formats.test_docx import BILLION

LIMIT = 100_000


def test_slides_are_read_in_the_order_of_the_presentation_and_are_pages() -> None:
    parsed = parse(pptx(shape("Harbour", kind="ctrTitle"), shape("Built in 1889.", "By Ada & Ben.")), LIMIT)
    assert parsed.text == "## Harbour\n\nBuilt in 1889.\n\nBy Ada & Ben."
    assert [(parsed.text[start:][:5], number) for start, number in parsed.pages] == [("## Ha", 1), ("Built", 2)]
    assert (parsed.title, parsed.metadata) == ("Harbour", {"format": "pptx", "slides": 2})


def test_a_strict_presentation_reads_the_same() -> None:
    assert parse(pptx(shape("Tea"), relations=STRICT_R), LIMIT).text == "Tea"


def test_the_title_of_a_slide_comes_first_and_is_one_line() -> None:
    assert parse(pptx(shape("body") + shape("Tea", "and cake", kind="title")), LIMIT).text == "## Tea and cake\n\nbody"


def test_tables_and_notes_are_read() -> None:
    rows = (("Year", "Ships"), ("1890", "12"))
    cells = "".join(
        "<a:tr>" + "".join(f"<a:tc><a:txBody><a:p><a:r><a:t>{text}</a:t></a:r></a:p></a:txBody></a:tc>" for text in row)
        + "</a:tr>" for row in rows
    )  # fmt: skip
    table = f"<p:graphicFrame><a:tbl>{cells}</a:tbl></p:graphicFrame>"
    notes = {0: shape("Say who.", kind="body") + shape("7", kind="sldNum")}
    assert parse(pptx(table, notes=notes), LIMIT).text == "Year | Ships\n1890 | 12\n\nNotes: Say who."


def test_what_is_no_content_of_a_slide_is_left_out() -> None:
    around = "".join(shape("GONE", kind=kind) for kind in ("sldNum", "dt", "ftr"))
    choice, fallback = f"<mc:Choice>{shape('once')}</mc:Choice>", f"<mc:Fallback>{shape('GONE')}</mc:Fallback>"
    twice = f"<mc:AlternateContent>{choice}{fallback}</mc:AlternateContent>"
    hidden = f'<p:sld {NAMES} show="0">{shape("GONE")}</p:sld>'
    around += '<p:sp><a:p><a:fld type="slidenum"><a:rPr/><a:t>GONE</a:t></a:fld></a:p></p:sp>'
    parsed = parse(pptx(hidden, shape("kept") + around + twice), LIMIT)
    assert (parsed.text, parsed.pages) == ("kept\n\nonce", ((0, 2),))


def test_what_is_hidden_in_a_group_is_left_out_and_words_for_pictures_are_read_once() -> None:
    def group(said: str, inside: str) -> str:
        return f"<p:grpSp><p:nvGrpSpPr><p:cNvPr {said}/></p:nvGrpSpPr>{inside}</p:grpSp>"

    inner = group("id='3'", shape("GONE"))
    hidden = group("id='2' hidden='1' descr='GONE'", shape("GONE") + inner + shape("GONE"))
    line = "<p:cxnSp><p:nvCxnSpPr><p:cNvPr descr='from A to B'/></p:nvCxnSpPr></p:cxnSp>"
    assert parse(pptx(line + hidden + shape("kept")), LIMIT).text == "from A to B\n\nkept"
    assert parse(pptx(group("descr='the yard'", shape("a")) + shape("b")), LIMIT).text == "the yard\n\na\n\nb"


def test_diagrams_are_read_before_the_notes() -> None:
    kinds = (("diagramDrawing", "../diagrams/drawing1.xml"), ("notesSlide", "../notesSlides/n0.xml"))
    drawn = shape("Plan") + shape("Build")
    parts = {
        "ppt/slides/_rels/slide1.xml.rels": links(*kinds),
        "ppt/diagrams/drawing1.xml": f"<d:drawing xmlns:d='d' {NAMES}>{drawn}</d:drawing>".encode(),
        "ppt/notesSlides/n0.xml": f"<p:notes {NAMES}>{shape('Say who.')}</p:notes>".encode(),
    }
    made = pptx(shape("Steps", kind="title"), **parts)
    assert parse(made, LIMIT).text == "## Steps\n\nPlan\n\nBuild\n\nNotes: Say who."


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ("1one 1two -plain 1again", "1. one\n2. two\n\nplain\n\n1. again"),
        ("1one 1 1two", "1. one\n2. two"),
        ("1one 1~gone 1three", "1. one\n3. three"),
        ("1one 1~gone -plain", "1. one\n\nplain"),
    ],
)
def test_paragraphs_have_the_numbers_that_powerpoint_shows(lines: str, shown: str) -> None:
    made = ""
    for line in lines.split(" "):
        number = "<a:pPr><a:buAutoNum type='arabicPeriod'/></a:pPr>" if line[0] == "1" else ""
        struck = " strike='sngStrike'" if "~" in line else ""
        run = f"<a:r><a:rPr{struck}/><a:t>{line[1:].strip('~')}</a:t></a:r>" if line[1:] else "<a:endParaRPr/>"
        made += f"<a:p>{number}{run}</a:p>"
    assert parse(pptx(f"<p:sp><p:txBody>{made}</p:txBody></p:sp>"), LIMIT).text == shown


def test_the_style_of_a_shape_numbers_and_strikes_out() -> None:
    number, strike = "<a:buAutoNum type='arabicPlain'/>", "<a:defRPr strike='sngStrike'/>"
    style = f"<a:lstStyle><a:lvl1pPr>{number}</a:lvl1pPr><a:lvl2pPr>{strike}</a:lvl2pPr></a:lstStyle>"
    lines = "".join(f"<a:p><a:pPr{more}</a:pPr><a:r><a:t>{text}</a:t></a:r></a:p>" for text, more in (
        ("one", ">"), ("two", ">"), ("old", " lvl='1'>"), ("plain", "><a:buNone/>"),
    ))  # fmt: skip
    made = pptx(f"<p:sp><p:txBody>{style}{lines}</p:txBody></p:sp>" + shape("next"))
    assert parse(made, LIMIT).text == "1 one\n2 two\n\nplain\n\nnext"


def test_an_escaped_line_end_is_one_and_a_picture_has_the_words_of_its_title() -> None:
    picture = "<p:pic><p:nvPicPr><p:cNvPr title='Plan'/></p:nvPicPr></p:pic>"
    assert parse(pptx(shape("Vala_x000B_Timo") + picture), LIMIT).text == "Vala\nTimo\n\nPlan"
    assert parse(pptx(shape("Vala_x000B_Timo", kind="title")), LIMIT).title == "Vala Timo"


def test_a_font_of_signs_beside_one_of_letters_shows_signs_alone() -> None:
    font = "<a:rPr><a:latin typeface='Arial'/><a:sym typeface='Wingdings'/></a:rPr>"
    runs = f"<a:r>{font}<a:t>more \uf0e0 done, x \xe0 déjà</a:t></a:r>"
    assert parse(pptx(f"<p:sp><a:p>{runs}</a:p></p:sp>"), LIMIT).text == "more → done, x → déjà"


def test_links_that_lead_out_of_the_archive_are_not_followed() -> None:
    outside = '<Relationship Id="r1" Type="x/slide" Target="file:///etc/passwd" TargetMode="External"/>'
    up = '<Relationship Id="r2" Type="x/slide" Target="../../../../etc/passwd"/>'
    parts = {"ppt/_rels/presentation.xml.rels": links(more=outside + up)}
    assert parse(pptx(shape("a"), shape("b"), **parts), LIMIT).text == ""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"text", "no PowerPoint presentation"),
        (archive({"a.txt": b"a"}), "another archive"),
        (docx(paragraph("a")), "another archive"),
        (pptx(shape("a"))[:-30], "no PowerPoint presentation"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, r"old \.ppt; save it as \.pptx"),
        (pptx("<a:t>&j;</a:t>", before=BILLION), "document type"),
        (pptx("<a:t/>", before='<!DOCTYPE l SYSTEM "file:///etc/passwd">'), "document type"),
        (pptx("<a:p>"), "damaged"),
    ],
)
def test_other_files_are_refused_with_a_reason(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        parse(data, LIMIT)


def test_bombs_are_too_large() -> None:
    with pytest.raises(TooLarge, match="its text has over 100000 bytes"):
        parse(pptx(*(shape("a" * 60_000) for _ in range(2))), LIMIT)
    with pytest.raises(TooLarge, match="have over"):
        parse(pptx(shape("a"), before=" " * (UNPACKED_BYTES + 1)), LIMIT)


LAYOUT = (
    '<a:lvl1pPr><a:buAutoNum type="arabicPeriod"/></a:lvl1pPr><a:lvl2pPr><a:defRPr strike="sngStrike"/></a:lvl2pPr>'
)


@pytest.mark.parametrize("place", ["layout", "placeholder of the master", "bodies of the master"])
def test_placeholders_take_over_numbers_and_what_is_struck_out(place: str) -> None:
    styled = f'<p:sp><p:nvPr><p:ph idx="1"/></p:nvPr><p:txBody><a:lstStyle>{LAYOUT}</a:lstStyle></p:txBody></p:sp>'
    master = f"<p:bodyStyle>{LAYOUT}</p:bodyStyle>" if place.startswith("bodies") else styled.replace(' idx="1"', "")
    parts = {
        "ppt/slides/_rels/slide1.xml.rels": links(("slideLayout", "../layouts/l.xml")),
        "ppt/layouts/_rels/l.xml.rels": links(("slideMaster", "../masters/m.xml")),
        "ppt/layouts/l.xml": f"<p:sldLayout {NAMES}>{styled if place == 'layout' else ''}</p:sldLayout>".encode(),
        "ppt/masters/m.xml": f"<p:sldMaster {NAMES}>{master if place != 'layout' else ''}</p:sldMaster>".encode(),
    }
    texts = "".join(
        f"<a:p><a:pPr {more}/><a:r><a:t>{text}</a:t></a:r></a:p>"
        for text, more in (("oil", ""), ("gone", 'lvl="1"'), ("rope", ""))
    )
    body = f'<p:sp><p:nvPr><p:ph idx="1"/></p:nvPr><p:txBody><a:lstStyle/>{texts}</p:txBody></p:sp>'
    assert parse(pptx(body + shape("plain"), **parts), LIMIT).text == "1. oil\n2. rope\n\nplain"

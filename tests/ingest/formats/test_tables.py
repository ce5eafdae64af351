"""Tables, lists, boxes and signs of pages, documents and slides keep what they say."""

from __future__ import annotations

import pytest

from ragkv.ingest.formats import docx, eml, html, pptx
from ragkv.passages import headings
from tests.ingest.formats import files, packages
from tests.ingest.formats.test_scripts import run

LIMIT = 100_000


def page(source: str) -> str:
    return html.parse(source.encode(), LIMIT).text


def document(body: str, **parts: str) -> str:
    return docx.parse(files.docx(body, **parts), LIMIT).text


def slide(source: str) -> str:
    return pptx.parse(packages.pptx(source), LIMIT).text


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ("<tr><td colspan=2>Site<td>Chief<tr><td>a<td>b<td>Vala", "Site | Site | Chief\na | b | Vala"),
        ("<tr><td rowspan=2>Orrin<td>day<td>Vala<tr><td>night<td>Timo", "Orrin | day | Vala\nOrrin | night | Timo"),
        ("<tr><td>day<td rowspan=3>Vala<tr><td>night<tr><td>dawn<tr><td>x<td>y",
         "day | Vala\nnight | Vala\ndawn | Vala\nx | y"),
        ("<tr><th rowspan=2>Site<th colspan=2>Shift<tr><th>day<th>night<tr><td>Orrin<td>1<td>2",
         "Site | Shift | Shift\nSite | day | night\nOrrin | 1 | 2"),
        ("<tr><td rowspan=2 colspan=2>a<td>b<tr><td>c", "a | a | b\na | a | c"),
        ("<tr><td rowspan=0>a<td>b<tr><td>c<tr><td>d", "a | b\na | c\na | d"),
        ("<tr><td colspan=x>a<td colspan=-3>b", "a | b"),
        ("<tr><td colspan=3>Staff of 2026<tr><td>a<td>b<td>c", "Staff of 2026\n\na | b | c"),
        ("<tr><td><ol><li>one<li>two</ol><td>b", "1. one 2. two | b"),
        ("<tr><td># <td>Name<tr><td>1<td>Vala", "    # | Name\n1 | Vala"),
        ("<tbody><tr><td rowspan=9>Orrin<td>day<tbody><tr><td>Lume<td>night", "Orrin | day\nLume | night"),
        ("<col><col style='visibility:collapse'><col><tr><td>Vala<td>71000<td>Orrin", "Vala | Orrin"),
        ("<col><col style='visibility:collapse'><tr><td>Vala<td>71000", "Vala"),
        ("<col><col style='display:none'><col><tr><td>Vala<td style='display:none'>71000<td>Orrin", "Vala | Orrin"),
    ],
)  # fmt: skip
def test_cells_of_a_page_are_repeated_where_they_span(rows: str, lines: str) -> None:
    assert page(f"<table>{rows}</table>") == lines


@pytest.mark.parametrize(
    ("style", "source", "shown"),
    [
        (".up{font-size:70%;vertical-align:super}", "holds 10<span class=up>6</span> litres", "holds 10^6 litres"),
        ("span.lo { vertical-align: sub }", "x<span class='a lo'>1</span> is", "x_1 is"),
        (".c5{text-decoration:line-through}", "price <span class=c5>120</span> 90", "price 90"),
        ("#old{text-decoration-line: underline line-through}", "price <i id=old>120</i> 90", "price 90"),
        (".al{list-style-type:lower-alpha}", "<ol class=al><li>one<li>two</ol>", "a. one\nb. two"),
        (".up{vertical-align:super} .x{display:none}", "1987<a class=up>3</a><p class=x>no</p>", "1987 [3]"),
        (".up a{vertical-align:super}", "1987<a>3</a>", "19873"),
        (".up a{vertical-align:super}", "<p class=up>1987<b><a>3</a></b>", "1987 [3]"),
        ("table.a .b{text-decoration:line-through}", "<table class=a><tr><td><i class=b>120</i> 90", "90"),
        ("ol.a > li > ol{list-style-type:lower-alpha}", "<ol class=a><li>L<ol><li>x</ol></ol>", "1. L\na. x"),
    ],
)  # fmt: skip
def test_style_sheets_raise_lower_strike_and_number_as_styles_do(style: str, source: str, shown: str) -> None:
    assert page(f"<style>{style}</style><body>{source}") == shown


def test_tables_in_tables_keep_to_themselves() -> None:
    inner = "<table><tr><td rowspan=2>x<td>y<tr><td>z</table>"
    assert page(f"<table><tr><td rowspan=2>a<td>{inner}<tr><td>b</table>") == "a | x | y x | z\na | b"


def test_what_is_hidden_ends_nothing_around_it() -> None:
    hidden = "<table hidden><tr><td>x</table><ol hidden><li>y</ol>"
    assert page(f"<ol><li>a{hidden}<li>b</ol>") == "1. a\n2. b"
    assert page(f"<table><tr><td rowspan=2>a<td>b{hidden}<tr hidden><td>z<tr><td>c</table>") == "a | b\na | c"


def test_a_long_cell_that_spans_is_not_repeated() -> None:
    long = "word " * 150
    assert page(f"<table><tr><td colspan=3>{long}<td>b</table>") == f"{long.strip()} |  |  | b"


def cell(text: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{files.paragraph(text)}</w:tc>"


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ((cell("Site", "<w:gridSpan w:val='2'/>") + cell("Chief"), cell("a") + cell("b") + cell("Vala")),
         "Site | Site | Chief\na | b | Vala"),
        ((cell("Orrin", "<w:vMerge w:val='restart'/>") + cell("day"), cell("", "<w:vMerge/>") + cell("night"),
          cell("", "<w:vMerge w:val='continue'/>") + cell("dawn"), cell("") + cell("noon") + cell("x")),
         "Orrin | day\nOrrin | night\nOrrin | dawn\n | noon | x"),
    ],
)  # fmt: skip
def test_cells_of_a_document_are_repeated_where_they_span(rows: tuple[str, ...], lines: str) -> None:
    assert document("<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in rows) + "</w:tbl>") == lines.strip()


def test_cells_of_a_slide_are_repeated_where_they_span() -> None:
    def cells(*texts: tuple[str, str]) -> str:
        made = (
            f"<a:tc {how}><a:txBody><a:p><a:r><a:t>{text}</a:t></a:r></a:p></a:txBody></a:tc>" for text, how in texts
        )
        return f"<a:tr>{''.join(made)}</a:tr>"

    rows = (
        cells(("Site", 'gridSpan="2"'), ("", 'hMerge="1"'), ("Chief", ""))
        + cells(("Orrin", 'rowSpan="2"'), ("day", ""), ("Vala", ""))
        + cells(("", 'vMerge="1"'), ("night", ""), ("Timo", ""))
    )
    shown = "Site | Site | Chief\nOrrin | day | Vala\nOrrin | night | Timo"
    assert slide(f"<p:graphicFrame><a:tbl>{rows}</a:tbl></p:graphicFrame>") == shown


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("<ol><li>first<li>second</ol>", "1. first\n2. second"),
        ("<ol start=5><li>fifth<li>sixth</ol>", "5. fifth\n6. sixth"),
        ("<ol><li value=3>a<li>b</ol>", "3. a\n4. b"),
        ("<ol type=a><li>x<li>y</ol>", "a. x\nb. y"),
        ("<ol type=I start=4><li>x</ol>", "IV. x"),
        ("<ol style='list-style-type: lower-roman'><li>x<li>y</ol>", "i. x\nii. y"),
        ("<ol reversed><li>x<li>y</ol>", "2. x\n1. y"),
        ("<ol><li>x<ul><li>y</ul><li>z</ol>", "1. x\n- y\n2. z"),
        ("<ul><li><input type=checkbox checked> done<li><input type=checkbox> open</ul>", "- [x] done\n- [ ] open"),
        ("<p><input type=radio checked>yes <input type=radio>no", "(x) yes ( ) no"),
        ("<p><b role=checkbox aria-checked=true></b>yes <b role=checkbox aria-checked=false></b>no", "[x] yes [ ] no"),
        ("<p>See <img src=a.png alt='the plan of the yard'>.", "See the plan of the yard ."),
        ("<p>See <img src=a.png alt=''><img src=b.png>it", "See it"),
    ],
)
def test_lists_boxes_and_pictures_of_a_page(source: str, shown: str) -> None:
    assert page(source) == shown


NUMBERS = """<w:abstractNum w:abstractNumId="1">
    <w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:lvlText w:val="%1."/></w:lvl>
    <w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/><w:lvlText w:val="%1.%2)"/></w:lvl>
    </w:abstractNum><w:abstractNum w:abstractNumId="2">
    <w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/><w:lvlText w:val="\uf0b7"/></w:lvl></w:abstractNum>
    <w:num w:numId="1"><w:abstractNumId w:val="1"/></w:num><w:num w:numId="2"><w:abstractNumId w:val="2"/></w:num>
    <w:num w:numId="3"><w:abstractNumId w:val="1"/>
    <w:lvlOverride w:ilvl="0"><w:startOverride w:val="5"/></w:lvlOverride>
    </w:num>"""


def item(text: str, list: int, level: int = 0, style: str = "") -> str:
    numbered = f"<w:numPr><w:ilvl w:val='{level}'/><w:numId w:val='{list}'/></w:numPr>"
    return files.paragraph(text, style, numbered)


def test_lists_of_a_document_keep_their_numbers() -> None:
    body = item("a", 1) + item("b", 1) + item("c", 1, 1) + item("d", 1, 1) + item("e", 1) + item("f", 1, 1)
    assert document(body, numbering=NUMBERS) == "1. a\n2. b\n2.a) c\n2.b) d\n3. e\n3.a) f"
    body = item("a", 2) + item("b", 3) + item("c", 3) + item("d", 0) + item("e", 9)
    assert document(body, numbering=NUMBERS) == "- a\n5. b\n6. c\n\nd\n\n- e"


def test_headings_of_a_document_keep_their_numbers() -> None:
    styles = "<w:style w:styleId='H'><w:name w:val='heading 2'/><w:pPr><w:numPr><w:numId w:val='1'/></w:numPr></w:pPr>"
    body = files.paragraph("Yard", "H") + files.paragraph("Crane", "H")
    assert document(body, numbering=NUMBERS, styles=f"{styles}</w:style>") == "## 1. Yard\n\n## 2. Crane"


def control(checked: int) -> str:
    box = f"<w:checkbox><w:checked w:val='{checked}'/></w:checkbox>"
    return f"<w:sdt><w:sdtPr>{box}</w:sdtPr><w:sdtContent>{run('●')}</w:sdtContent></w:sdt>"


def field(content: str) -> str:
    return f"<w:r><w:fldChar><w:ffData><w:checkBox>{content}</w:checkBox></w:ffData></w:fldChar></w:r>"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (field("<w:default w:val='1'/>") + run(" Smoking"), "[x] Smoking"),
        (field("<w:default w:val='1'/><w:checked w:val='0'/>") + run(" Smoking"), "[ ] Smoking"),
        (field("<w:checked/>") + run(" Smoking"), "[x] Smoking"),
        ("<w:r><w:sym w:font='Wingdings' w:char='F0FE'/></w:r>" + run(" Smoking"), "[x] Smoking"),
        (control(1) + run(" Smoking"), "[x] Smoking"),
        (control(0) + run("o"), "[ ]o"),
        ("<w:r><w:pict><v:textpath xmlns:v='v' string='Tarn Day'/></w:pict></w:r>", "Tarn Day"),
        ("<w:r><w:sym w:font='Wingdings' w:char='F0A8'/></w:r>" + run(" Pets"), "[ ] Pets"),
        (run("5 ") + "<w:r><w:sym w:font='Symbol' w:char='F0A3'/></w:r>" + run(" 7"), "5 ≤ 7"),
        (run("5 \uf0a3 7", "<w:rFonts w:ascii='Symbol' w:hAnsi='Symbol'/>"), "5 ≤ 7"),
        (run("5 ") + run("m", "<w:rFonts w:ascii='Symbol'/>") + run("g"), "5 μg"),
        ("<w:r><w:t>Port</w:t><w:ptab/><w:t>8080</w:t></w:r>", "Port 8080"),
        (
            "<w:r><w:drawing><wp:docPr xmlns:wp='w' id='1' descr='Plan of the yard'/></w:drawing></w:r>",
            "Plan of the yard",
        ),
    ],
)
def test_boxes_signs_tabs_and_pictures_of_a_document(source: str, shown: str) -> None:
    assert document(f"<w:p>{source}</w:p>") == shown


def test_lists_signs_and_pictures_of_a_slide() -> None:
    def numbered(text: str, kind: str = "arabicPeriod", level: int = 0) -> str:
        auto = f'<a:pPr lvl="{level}"><a:buAutoNum type="{kind}"/></a:pPr>'
        return f"<a:p>{auto}<a:r><a:t>{text}</a:t></a:r></a:p>"

    body = numbered("a") + numbered("b") + numbered("c", "alphaLcParenR", 1) + numbered("d")
    assert slide(f"<p:sp><p:txBody>{body}</p:txBody></p:sp>") == "1. a\n2. b\na) c\n3. d"
    signed = '<a:r><a:rPr><a:sym typeface="Wingdings"/></a:rPr><a:t>\uf0fe</a:t></a:r><a:r><a:t> Smoking</a:t></a:r>'
    assert slide(f"<p:sp><a:p>{signed}</a:p></p:sp>") == "[x] Smoking"
    assert slide('<p:pic><p:nvPicPr><p:cNvPr id="4" descr="Plan"/></p:nvPicPr></p:pic>') == "Plan"


@pytest.mark.parametrize(
    "source",
    [
        "<h1>Build</h1><pre>#define PORT 8080\n# a comment\nmake\n</pre>",
        "<h1>Build</h1><pre>   ## a comment</pre>",
        "<h1>Build</h1><p># of units: 4",
        "<h1>Build</h1><p>Units<br># of units: 4",
        "<h1>Build</h1><ul><li>a<br># b</ul>",
        "<h1>Build</h1><pre>```\ncode</pre>",
    ],
)
def test_lines_that_look_like_headings_are_none(source: str) -> None:
    text = page(source + "<h2>Install</h2>")
    assert [heading for _, heading in headings(text)] == ["Build", "Install"]


def test_lines_of_a_message_that_look_like_headings_are_none() -> None:
    assert eml.parse(b"Subject: Crane\r\n\r\n# of units", LIMIT).text == "# Crane\n\n    # of units"
    text = eml.parse(b"Subject: Crane\r\n\r\nOrder\r\n# of units: 4\r\nok", LIMIT).text
    assert [heading for _, heading in headings(text)] == ["Crane"]
    assert "# of units: 4" in text


@pytest.mark.parametrize(
    ("style", "hidden"),
    [
        (".x{display:none}", True),
        ("p.a, .x { color: red; visibility : hidden }", True),
        ("#i{display:none}", True),
        ("div.x{display:none}", True),
        ("/* a */ .x /* b */ {display:none}", True),
        ("@charset 'utf-8'; .x{display:none}", True),
        (".x{display:none} .x.open{display:block}", True),
        (".x{display:none} .x{display:block}", False),
        ("@media print{.x{display:none} .y{color:red}}", False),
        (".no-js .x{display:none}", False),
        (".main .x{display:none}", True),
        (".wide #top.main div.x{display:none}", True),
        (".main div .x{display:none}", False),
        ("#top > .x{display:none}", True),
        (".wide>body>#top > .z{display:none}", True),
        (".wide > #top .x{display:none}", False),
        ("html.wide .x{display:none}", True),
        (".main .x{display:none} .x{display:block}", True),
        (".x{display:none} .main .x{display:block}", False),
        (".main .x{display:none} #top > .x{display:block}", False),
        (".z{display:block} .x{display:none}", True),
        (".y + .x{display:none}", False),
        (".main .x[title]{display:none}", False),
        (".main [data-k]{display:none}", True),
        ("div[data-k='7']{display:none}", True),
        ("div[data-k='8']{display:none}", False),
        (".main > {display:none}", False),
        ("> .x{display:none}", False),
        ("*{display:none}", False),
        ("p *{display:none}", False),
        (".x *{display:none}", False),
        (".x:hover{display:none}", False),
        ("p.x{display:none}", False),
        (".y{display:none}", False),
        ("body{display:none}", False),
        (".x{", False),
    ],
)
def test_what_the_style_of_a_page_hides_is_left_out(style: str, hidden: bool) -> None:
    shown = page(
        f"<html class=wide><head><style>{style}</style></head><body><p>a</p>"
        "<div class=main id=top><div class='z x' id=i data-k=7>secret</div><p>b</p></div>"
    )
    assert shown == ("a\n\nb" if hidden else "a\n\nsecret\n\nb")


def test_cells_of_a_document_stand_below_their_names() -> None:
    cells = "".join(f"<w:tc>{files.paragraph(text)}</w:tc>" for text in ("night", "Timo"))
    before = '<w:tr><w:trPr><w:gridBefore w:val="1"/></w:trPr>'
    names = "".join(f"<w:tc>{files.paragraph(text)}</w:tc>" for text in ("Site", "Shift", "Chief"))
    assert (
        document(f"<w:tbl><w:tr>{names}</w:tr>{before}{cells}</w:tr></w:tbl>")
        == "Site | Shift | Chief\n | night | Timo"
    )


def test_a_paragraph_whose_end_was_taken_out_goes_on_in_the_next() -> None:
    for taken in ("del", "moveFrom"):
        first = f'<w:p><w:pPr><w:rPr><w:{taken} w:id="1"/></w:rPr></w:pPr>{run("The bridge cost ")}</w:p>'
        assert document(first + files.paragraph("90 crowns.") + files.paragraph("Next.")) == (
            "The bridge cost 90 crowns.\n\nNext."
        )


def test_the_choice_of_a_form_is_read() -> None:
    entries = '<w:listEntry w:val="day"/><w:listEntry w:val="night"/>'
    for result, shown in (('<w:result w:val="1"/>', "night"), ('<w:default w:val="0"/>', "day"), ("", "day")):
        data = f"<w:ffData><w:ddList>{result}{entries}</w:ddList></w:ffData>"
        field = f'<w:r><w:fldChar w:fldCharType="begin">{data}</w:fldChar></w:r>'
        assert document(f"<w:p>{field}{run(' shift')}</w:p>") == f"{shown} shift"


def test_hidden_shapes_of_a_slide_are_left_out() -> None:
    hidden = '<p:sp><p:nvSpPr><p:cNvPr id="1" hidden="1"/><p:nvPr><p:ph type="body"/></p:nvPr></p:nvSpPr>'
    text = "<p:txBody><a:p><a:r><a:t>secret</a:t></a:r></a:p></p:txBody></p:sp>"
    assert slide(hidden + text + packages.shape("seen")) == "seen"

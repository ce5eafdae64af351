"""What stands above and below the line, formulas, what is struck out and readings keep figures what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ragkv.ingest.formats import docx, eml, epub, html, pptx
from ragkv.ingest.formats.base import MAX_TITLE
from tests.growth import grows_linearly
from tests.ingest.formats import files, packages

LIMIT = 100_000
SHOWN = [
    ("holds 10<sup>6</sup> litres", "holds 10^6 litres"),
    ("10<sup>&minus;6</sup> mol", "10^−6 mol"),
    ("10<sup>−</sup><sup>6</sup>", "10^−6"),
    ("x<sup>2</sup> and m<sup>2</sup>, 5 km<sup>2</sup>", "x^2 and m^2, 5 km^2"),
    ("x<sup>n+1</sup>, x<sup>(n+1)</sup>", "x^(n+1), x^(n+1)"),
    ("10<sup>6 </sup>litres, 90 <sup>km</sup>/<sub>h</sub>, 3<sup>.º</sup>", "10^6 litres, 90 km/h, 3.º"),
    ("x<sub>1</sub>, v<sub>max</sub>, a<sub>i+1</sub>", "x_1, v_max, a_(i+1)"),
    ("x<sub>1</sub><sup>2</sup>", "x_1^2"),
    ("H<sub>2</sub>O, C<sub>6</sub>H<sub>12</sub>O<sub>6</sub>", "H2O, C6H12O6"),
    ("Fe<sub>2</sub>(SO<sub>4</sub>)<sub>3</sub>", "Fe2(SO4)3"),
    ("SO<sub>4</sub><sup>2−</sup>", "SO4^2−"),
    ("log<sub>2</sub> 8", "log_2 8"),
    ("log<sub>2</sub>8", "log_2 8"),
    ("$19<sup>95</sup>, 1.299<sup>00</sup> €, 10<sup>12</sup> €", "$19.95, 1.299,00 €, 10^12 €"),
    ("1<sup>1</sup>/<sub>2</sub> cups", "1 1/2 cups"),
    ("<sup>3</sup>&frasl;<sub>4</sub> cup", "3⁄4 cup"),
    (
        "the 1<sup>st</sup>, M<sup>me</sup> Brook, n<sup>o</sup> 5, Tarn<sup>TM</sup>",
        "the 1st, Mme Brook, no 5, TarnTM",
    ),
    ("only.<sup><a href='#n4'>4</a></sup> Next", "only. [4] Next"),
    ("only.<sup>4</sup>", "only. [4]"),
    ("in 1987<sup>3</sup>", "in 1987 [3]"),
    ("said so<sup>[<i><a href='/w'>unreliable source?</a></i>]</sup> and", "said so [unreliable source?] and"),
    ("harbour<sup>3</sup>", "harbour [3]"),
    ("10<sup><a href='#n'>6</a></sup> litres", "10 [6] litres"),
    ("10 <sup>6</sup> litres", "10^6 litres"),
    ("<sup>14</sup>C and <sup>235</sup>U", "^14C and ^235U"),
    ("Ada<sup>1,2</sup>, XX<sup>e</sup>, 20<sup>o</sup>C, x<sup>′</sup>", "Ada [1,2], XXe, 20°C, x′"),
    ("x<sup>2a</sup>, Na<sup>+</sup>, sin<sup>2</sup>", "x^(2a), Na^+, sin^2"),
    ("said<sup class=reference><a href='#c'>[12]</a></sup>.", "said [12]."),
    ("said<sup>*</sup>", "said [*]"),
    ("in 1987<a role=doc-noteref href='#n'><sup>3</sup></a>.", "in 1987 [3]."),
    ("<sup>4</sup> See there.", "[4] See there."),
    ("cost 12<a href='notes.xhtml#n'><sup>3</sup></a> crowns", "cost 12 [3] crowns"),
    ("cost 12<sup><a href='notes.xhtml#n'>3</a></sup> crowns", "cost 12 [3] crowns"),
    ("in 1987<a href='#n'>3</a>.", "in 1987 [3]."),
    ("see <a href='#s'>3</a> and (<a href='#s'>4</a>)", "see 3 and (4)"),
    ("10<span style='vertical-align: super'>6</span>", "10^6"),
    ("10<b style='position:relative;top:-4px;font-size:70%'>6</b> l", "10^6 l"),
    ("x<b style='vertical-align:-3pt;font-size:6pt'>1</b>", "x_1"),
    ("<b style='vertical-align:-2px'>5</b>6", "56"),
    ("5<b style='position:absolute;top:4px;font-size:6pt'>6</b>", "56"),
    ("120<sup>1)</sup>, 5%<sup>2</sup>", "120 [1], 5% [2]"),
    ("e<sup>x<sup>2</sup></sup>", "e^(x^2)"),
    ("10<sup>6</sup>5", "10^6 5"),
    ("5&nbsp;<sup>o</sup>C, $19<sup>.99</sup>", "5 °C, $19.99"),
    ("10<span style='position:relative;top:-3.0pt;mso-text-raise:3.0pt'>6</span> l", "10^6 l"),
    ("x<span style='position:relative;top:3.0pt'>1</span>", "x_1"),
    ("<a href='#r1'>1</a>By Timo", "[1] By Timo"),
    ("Use <i><b style='display:block'>1</b>/<b style='display:block'>2</b></i> cup", "Use 1/2 cup"),
    ("a<sup></sup>b<sub> </sub>c", "abc"),
    ("The price is <s>120</s> 90", "The price is 90"),
    ("<del>120</del><ins>90</ins>", "90"),
    ("<span style='text-decoration:line-through'>120</span> <strike>100</strike> 90", "90"),
    ("<ruby>東京<rp>(</rp><rt>とうきょう</rt><rp>)</rp></ruby>の倉庫", "東京の倉庫"),
]


@pytest.mark.parametrize(("source", "shown"), SHOWN)
def test_scripts_of_a_page_a_book_and_a_message(source: str, shown: str) -> None:
    page = f"<p>{source}</p>"
    assert html.parse(page.encode(), LIMIT).text == shown
    head = b"Subject: a\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    assert eml.parse(head + page.encode(), LIMIT).text == f"# a\n\n{shown}"
    assert epub.parse(packages.epub({"a.xhtml": f"<html><body>{page}</body></html>"}), LIMIT).text == shown


def test_a_note_of_a_book_is_apart_from_the_year() -> None:
    mark = "<a epub:type='noteref' href='#n'>3</a>"
    page = f"<html xmlns:epub='http://www.idpf.org/2007/ops'><body><p>In 1987{mark}.</p></body></html>"
    assert epub.parse(packages.epub({"a.xhtml": page}), LIMIT).text == "In 1987 [3]."


MATHML = [
    ("<msup><mi>x</mi><mn>2</mn></msup>", "x^2"),
    ("<msub><mi>x</mi><mn>1</mn></msub>", "x_1"),
    ("<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>", "x_1^2"),
    ("<mfrac><mn>1</mn><mn>2</mn></mfrac>", "1/2"),
    ("<mn>1</mn><mfrac><mn>1</mn><mn>2</mn></mfrac>", "1 1/2"),
    ("<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac>", "(a+b)/2"),
    ("<mfrac><mi>b</mi><mrow><mn>2</mn><mi>a</mi></mrow></mfrac>", "b/(2a)"),
    ("<mfrac linethickness=0><mi>n</mi><mi>k</mi></mfrac>", "(n choose k)"),
    ("<msqrt><mn>16</mn></msqrt>", "√16"),
    ("<msqrt><mi>a</mi><mo>+</mo><mn>1</mn></msqrt>", "√(a+1)"),
    ("<mroot><mn>8</mn><mn>3</mn></mroot>", "³√8"),
    ("<mi>y</mi><mo>=</mo><mn>2</mn><mo>\u2062</mo><mi>x</mi>", "y = 2x"),
    ("<mi>sin</mi><mi>x</mi>", "sin x"),
    ("<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>i</mi>",
     "∑_(i = 1)^n i"),
    ("<mtable><mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr><mtr><mtd>3</mtd><mtd>4</mtd></mtr></mtable>",
     "[1, 2; 3, 4]"),
    ("<mmultiscripts><mi>C</mi><mprescripts/><mn>6</mn><mn>14</mn></mmultiscripts>", "_6^14C"),
    ("<semantics><mrow><mi>x</mi></mrow><annotation encoding='application/x-tex'>x</annotation></semantics>", "x"),
    ("<mn>1</mn> <mn>2</mn>", "1 2"),
    ("<msup><mrow/><mn>2</mn></msup>", "^2"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "shown"), MATHML)
def test_formulas_of_a_page(source: str, shown: str) -> None:
    assert html.parse(f"<p>so <math>{source}</math> end".encode(), LIMIT).text == f"so {shown} end"


def test_a_formula_that_a_script_draws_is_read_once() -> None:
    math = "<math><mi>x</mi></math>"
    drawn = f"<span class=katex><span class=katex-mathml>{math}</span><span aria-hidden=true>GONE</span></span>"
    assert html.parse(f"<p>{drawn}".encode(), LIMIT).text == "x"
    picture = f"<span class='mwe-math-mathml-inline' style='display:none'>{math}</span><img alt=GONE aria-hidden=true>"
    assert html.parse(f"<p>{picture}".encode(), LIMIT).text == "x"
    assert html.parse(b"<p>5<math><mfrac><mn>1</mn><mn>2</mn></mfrac></math>", LIMIT).text == "5 1/2"


def run(text: str, properties: str = "") -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t xml:space='preserve'>{text}</w:t></w:r>"


SUP, SUB = "<w:vertAlign w:val='superscript'/>", "<w:vertAlign w:val='subscript'/>"
M = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'


def term(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


WORD = [
    (run("10") + run("6", SUP) + run(" litres"), "10^6 litres"),
    (run("10") + run("−", SUP) + run("6", SUP), "10^−6"),
    (run("H") + run("2", SUB) + run("O"), "H2O"),
    (run("x") + run("1", SUB) + run("2", SUP), "x_1^2"),
    (run("in 1987") + run("3", SUP) + run("."), "in 1987 [3]."),
    (run("120", "<w:strike/>") + run(" 90"), "90"),
    (run("120", "<w:dstrike/>") + run("90", "<w:strike w:val='0'/>"), "90"),
    (run("120", "<w:rStyle w:val='Out'/>") + run("90"), "90"),
    (run("10") + run("6", "<w:rStyle w:val='Up'/>"), "10^6"),
    (
        "<w:r><w:ruby><w:rt>" + run("GONE") + "</w:rt><w:rubyBase>" + run("東京") + "</w:rubyBase></w:ruby></w:r>",
        "東京",
    ),
    (run("a") + "<w:r><w:footnoteReference w:id='7'/></w:r>" + run(" b"), "a [1] b"),
    (run("10") + run("6", "<w:position w:val='8'/><w:sz w:val='14'/>") + run(" litres"), "10^6 litres"),
    (run("x") + run("1", "<w:position w:val='-6'/>") + run(" is"), "x_1 is"),
    (run("as") + run("is", "<w:position w:val='2'/>"), "asis"),
    (run("90", "<w:rPrChange><w:rPr><w:strike/></w:rPr></w:rPrChange>"), "90"),
]
STYLES = (
    "<w:style w:styleId='Out'><w:rPr><w:strike/></w:rPr></w:style>"
    "<w:style w:styleId='Raised'><w:rPr><w:vertAlign w:val='superscript'/></w:rPr></w:style>"
    "<w:style w:styleId='Up'><w:basedOn w:val='Raised'/></w:style>"
)


@pytest.mark.parametrize(("source", "shown"), WORD)
def test_scripts_of_a_document(source: str, shown: str) -> None:
    assert docx.parse(files.docx(f"<w:p>{source}</w:p>", styles=STYLES), LIMIT).text == shown


def test_notes_of_a_document_have_the_numbers_that_refer_to_them() -> None:
    body = f"<w:p>{run('In 1987')}<w:r><w:footnoteReference w:id='7'/></w:r>{run('.')}</w:p>"
    notes = f"<w:footnote w:id='7'><w:p><w:r><w:footnoteRef/></w:r>{run('See there.')}</w:p></w:footnote>"
    assert docx.parse(files.docx(body, footnotes=notes), LIMIT).text == "In 1987 [1].\n\n[1] See there."


def test_a_note_whose_mark_was_taken_out_is_left_out() -> None:
    body = f"<w:p>{run('In 1987')}<w:del><w:r><w:footnoteReference w:id='7'/></w:r></w:del></w:p>"
    assert docx.parse(files.docx(body, footnotes=f"<w:footnote w:id='7'>{body}</w:footnote>"), LIMIT).text == "In 1987"


def test_formulas_that_follow_each_other_are_apart() -> None:
    two = f"<m:oMath>{term('x')}</m:oMath>" * 2
    body = f"<w:p {M}><m:oMathPara>{two}</m:oMathPara></w:p>"
    assert docx.parse(files.docx(body), LIMIT).text == "x x"


OFFICE = [
    (f"<m:f><m:num>{term(1)}</m:num><m:den>{term(2)}</m:den></m:f>", "1/2"),
    (f"<m:f><m:fPr><m:type m:val='noBar'/></m:fPr><m:num>{term('n')}</m:num><m:den>{term('k')}</m:den></m:f>",
     "(n choose k)"),
    (f"<m:sSup><m:e>{term('x')}</m:e><m:sup>{term(2)}</m:sup></m:sSup>", "x^2"),
    (f"<m:sSub><m:e>{term('x')}</m:e><m:sub>{term('i+1')}</m:sub></m:sSub>", "x_(i+1)"),
    (f"<m:rad><m:radPr><m:degHide m:val='1'/></m:radPr><m:deg/><m:e>{term(16)}</m:e></m:rad>", "√16"),
    (f"<m:rad><m:deg>{term(3)}</m:deg><m:e>{term(8)}</m:e></m:rad>", "³√8"),
    (f"<m:m><m:mr><m:e>{term(1)}</m:e><m:e>{term(2)}</m:e></m:mr><m:mr><m:e/><m:e>{term(4)}</m:e></m:mr></m:m>",
     "[1, 2; , 4]"),
    (f"<m:d><m:dPr><m:begChr m:val='['/><m:endChr m:val=''/></m:dPr><m:e>{term('a')}</m:e></m:d>", "[a"),
    (f"<m:nary><m:naryPr><m:chr m:val='∑'/></m:naryPr><m:sub>{term('i=1')}</m:sub><m:sup>{term('n')}</m:sup>"
     f"<m:e>{term('i')}</m:e></m:nary>", "∑_(i=1)^n i"),
    (f"{term('P')}<m:d><m:e>{term('A')}</m:e><m:e>{term('B')}</m:e></m:d>", "P(A|B)"),
    (f"<m:eqArr><m:e>{term('x&amp;=1')}</m:e><m:e>{term('y&amp;=2#(3)')}</m:e></m:eqArr>", "x=1; y=2 (3)"),
    (f"<m:f><m:num>{term(1)}</m:num><m:den>{term(2)}</m:den></m:f>{term('m')}", "1/2 m"),
    (f"<m:func><m:fName>{term('sin')}</m:fName><m:e>{term('x')}</m:e></m:func>", "sin x"),
    (f"<m:phant>{term(5)}</m:phant><m:phant><m:phantPr><m:show m:val='0'/></m:phantPr>{term(7)}</m:phant>", "5"),
    (f"<m:r><m:rPr><m:strike/></m:rPr><m:t>120</m:t></m:r>{term(90)}", "90"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "shown"), OFFICE)
def test_formulas_of_a_document_and_a_slide(source: str, shown: str) -> None:
    body = f"<w:p {M}>{run('so ')}<m:oMath>{source}</m:oMath>{run(' end')}</w:p>"
    assert docx.parse(files.docx(body), LIMIT).text == f"so {shown} end"
    slide = f"<p:sp><p:txBody><a:p {M}><a:r><a:t>so </a:t></a:r><m:oMath>{source}</m:oMath></a:p></p:txBody></p:sp>"
    assert pptx.parse(packages.pptx(slide), LIMIT).text == f"so {shown}"


@pytest.mark.parametrize(
    ("properties", "shown"),
    [
        ("baseline='30000'", "10^6"),
        ("baseline='-25000'", "10_6"),
        ("strike='sngStrike'", "10"),
        ("baseline='0'", "106"),
    ],
)
def test_scripts_of_a_slide(properties: str, shown: str) -> None:
    runs = f"<a:r><a:t>10</a:t></a:r><a:r><a:rPr {properties}/><a:t>6</a:t></a:r>"
    assert pptx.parse(packages.pptx(f"<p:sp><a:p>{runs}</a:p></p:sp>"), LIMIT).text == shown


DEEP: dict[str, Callable[[int], str]] = {
    "formulas in formulas": lambda n: "<math>" + "<msqrt>" * n + "a" * n + "</msqrt>" * n + "</math>",
    "scripts in scripts": lambda n: "<sup>" * n + "a" * n,
    "scripts after scripts": lambda n: "a<sup>2</sup>" * n,
    "brackets": lambda n: "<math><msup><mtext>" + "(" * n + "</mtext><mi>x</mi></msup></math>",
    "hidden by class": lambda n: "<style>.a.b{display:none}</style>" + "<b class='a c'>x</b>" * n,
    "rules": lambda n: "<style>" + ".a{display:none}" * n + "</style>x",
    "open rules": lambda n: "<style>" + "@media{" * n + "</style>x",
    "wide cells": lambda n: "<table>" + "<tr><td colspan=99>a<td>b" * n,
    "tall cells": lambda n: "<table><tr><td rowspan=9999>a" + "<tr><td>b" * n,
}


@pytest.mark.parametrize("name", DEEP)
def test_the_time_grows_with_the_page(name: str) -> None:
    def read(source: str) -> object:
        return html.parse(source.encode(), 1 << 30)

    assert grows_linearly(read, DEEP[name], 2000)


def test_marks_do_not_lengthen_a_title() -> None:
    page = f"<h1>10<sup>6</sup> {'a' * 2 * MAX_TITLE}</h1>"
    assert len(html.parse(page.encode(), LIMIT).title) == MAX_TITLE

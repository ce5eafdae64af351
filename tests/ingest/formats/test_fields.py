"""Fields of Word without a result show what their code says; those with one show it."""

from __future__ import annotations

import pytest

from ragkv.ingest.formats import docx
from tests.ingest.formats.files import docx as document
from tests.ingest.formats.files import table

CODES = [
    (r"EQ \f(1,2)", "take 1/2 now"),
    (r"eq \f(a+b;\r(3,27))", "take (a+b)/(³√27) now"),
    (r"EQ 10\s\up5(6)", "take 10^6 now"),
    (r"EQ x\s\do5(1)", "take x_1 now"),
    (r'EQ \* jc2 \* "Font:Mincho" \o\ad(\s\up 9(とう),東)', "take 東 now"),
    (r"EQ \i(0,1,x)", "take ∫_0^1 x now"),
    (r"EQ \b\bc\[(\a\al\co2(1,2,3,4))", "take (1, 2, 3, 4) now"),
    (r"EQ \f(2\,5,3)", "take 2,5/3 now"),
    (r'SYMBOL 163 \f "Symbol" \s 12', "take ≤ now"),
    ("SYMBOL 0x2264", "take ≤ now"),
    ("PAGE", "take now"),
    ("EQ " + r"\f(" * 500, None),
]


def mark(kind: str) -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>'


def run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def text_of(body: str) -> str:
    return docx.parse(document(body), 100_000).text


@pytest.mark.parametrize(("code", "shown"), CODES)
def test_a_field_without_a_result_shows_what_its_code_says(code: str, shown: str | None) -> None:
    field = f"{mark('begin')}<w:r><w:instrText>{code}</w:instrText></w:r>{mark('separate')}{mark('end')}"
    text = text_of(f"<w:p>{run('take ')}{field}{run(' now')}</w:p>")
    assert text == (shown or text)


def test_a_field_in_one_element_shows_its_result_or_its_code() -> None:
    field = "<w:p><w:fldSimple w:instr='EQ \\f(1,2)'>{}</w:fldSimple>{}</w:p>"
    assert text_of(field.format("", run(" now"))) == "1/2 now"
    assert text_of(field.format(run("half"), run(" now"))) == "half now"


def test_the_result_of_a_field_is_shown_and_not_its_code() -> None:
    field = (
        f"{mark('begin')}<w:r><w:instrText>EQ \\f(1,2)</w:instrText></w:r>{mark('separate')}{run('half')}{mark('end')}"
    )
    assert text_of(f"<w:p>{field}{run(' now')}</w:p>") == "half now"


def test_a_field_in_the_code_of_another_one_is_not_shown() -> None:
    inner = (
        f"{mark('begin')}<w:r><w:instrText>MERGEFIELD a</w:instrText></w:r>{mark('separate')}{run('5')}{mark('end')}"
    )
    outer = (
        f"{mark('begin')}<w:r><w:instrText>IF </w:instrText></w:r>{inner}{mark('separate')}{run('yes')}{mark('end')}"
    )
    assert text_of(f"<w:p>{outer}{run(' now')}</w:p>") == "yes now"
    open_one = f"{mark('begin')}<w:r><w:instrText>IF </w:instrText></w:r>{run('5')}"
    assert text_of(f"<w:p>{open_one}</w:p><w:p>{run('on')}</w:p>") == "on"


@pytest.mark.parametrize("gone", ["<w:del/>", "<w:hidden/>"])
def test_a_row_that_was_taken_out_or_is_hidden_is_left_out(gone: str) -> None:
    rows = table(("Name", "Town"), ("Vala", "Orrin"), ("Timo", "Lume"))
    at = rows.index("<w:tr>", rows.index("Town")) + len("<w:tr>")
    assert text_of(f"{rows[:at]}<w:trPr>{gone}</w:trPr>{rows[at:]}") == "Name | Town\nTimo | Lume"


def test_a_cell_that_was_taken_out_is_left_out() -> None:
    rows = table(("Name", "Pay", "Town"))
    gone = rows.replace(
        "<w:tc><w:p><w:pPr></w:pPr><w:r><w:t>Pay", "<w:tc><w:tcPr><w:cellDel/></w:tcPr><w:p><w:r><w:t>Pay"
    )
    assert "Pay" in text_of(rows)
    assert "Pay" not in text_of(gone)


def test_words_of_a_picture_stand_for_it_unless_it_is_hidden() -> None:
    pictures = (
        '<w:drawing><w:docPr title="Plan"/></w:drawing><w:drawing><w:docPr descr="Draft" hidden="1"/></w:drawing>'
    )
    assert text_of(f"<w:p><w:r>{pictures}</w:r></w:p>") == "Plan"

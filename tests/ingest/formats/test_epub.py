"""E-books: chapters are read in the order of the spine, and protected books are refused."""

from __future__ import annotations

import pytest

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.epub import parse
from tests.ingest.formats.files import archive
from tests.ingest.formats.packages import epub
from tests.ingest.formats.test_docx import BILLION

LIMIT = 100_000


def page(body: str) -> str:
    return (
        '<?xml version="1.0"?><!DOCTYPE html PUBLIC "x" "http://nowhere.example/xhtml11.dtd">'
        f'<html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body>{body}</body></html>'
    )


def test_chapters_are_read_in_the_order_of_the_spine() -> None:
    pages = {"b.xhtml": page("<h1>Two</h1><p>Cake.</p>"), "a 1.xhtml": page('<h1>One</h1><p>Tea<a id="x"/> time.</p>')}
    parsed = parse(epub({**pages, "nav.xhtml": page("GONE")}, ["a 1.xhtml", "nav.xhtml", "b.xhtml"]), LIMIT)
    assert parsed.text == "# One\n\nTea time.\n\n# Two\n\nCake."
    assert (parsed.title, parsed.metadata) == ("The yard", {"format": "epub", "language": "en"})


def test_an_element_that_is_closed_at_once_does_not_swallow_the_rest() -> None:
    assert parse(epub({"a": page('<div class="x"/><script src="y"/><p>kept<br/>too</p>')}), LIMIT).text == "kept\ntoo"


def test_code_at_the_beginning_of_a_chapter_is_no_heading() -> None:
    assert parse(epub({"a.xhtml": page("<pre># install\nmake</pre>")}), LIMIT).text == ("    # install\n    make")


def test_heads_and_notes_of_chapters_are_read_and_page_numbers_are_not() -> None:
    note = '<aside epub:type="footnote">* in snow</aside>'
    chapter = f'<header><h1>One<br/>Snow</h1></header><p>In 19<i epub:type="pagebreak">6</i>87*</p>{note}'
    assert parse(epub({"a": page(chapter)}), LIMIT).text == "# One Snow\n\nIn 1987*\n\n* in snow"


def test_mathml_may_have_a_prefix() -> None:
    formula = (
        '<m:math xmlns:m="http://www.w3.org/1998/Math/MathML"><m:mfrac><m:mn>1</m:mn><m:mn>2</m:mn></m:mfrac></m:math>'
    )
    both = f"<epub:switch><epub:case>{formula}</epub:case><epub:default>half</epub:default></epub:switch>"
    assert parse(epub({"a": page(f"<p>{both} l</p>")}), LIMIT).text == "1/2 l"


def test_style_sheets_of_the_book_count() -> None:
    link = '<head><link rel="stylesheet" href="css/a%20b.css"/></head>'
    chapter = f'<html>{link}<body><p>10<i class="up">6</i> l</p></body></html>'
    book = epub({"a": chapter}, **{"OPS/text/css/a b.css": b".up { vertical-align: super }"})
    assert parse(book, LIMIT).text == "10^6 l"


def test_a_style_sheet_counts_that_another_one_imports() -> None:
    link = '<head><link rel="stylesheet" href="css/a.css"/></head>'
    chapter = f'<html>{link}<body><p>10<i class="up">6</i> l</p></body></html>'
    first = b"@import url('../b.css'); @import \"a.css\";"
    book = epub({"a": chapter}, **{"OPS/text/css/a.css": first, "OPS/text/b.css": b".up { vertical-align: super }"})
    assert parse(book, LIMIT).text == "10^6 l"


def test_the_first_title_is_that_of_the_book() -> None:
    titles, page = b"<title>The yard</title><title>A tale</title>", b'<item id="a" href="a" media-type="text/html"/>'
    data = b"<p>" + titles + page + b'<itemref idref="a"/></p>'
    parts = {"META-INF/container.xml": b'<c><rootfile full-path="b.opf"/></c>', "b.opf": data, "a": b"Tea"}
    assert parse(archive(parts), LIMIT).title == "The yard"


def test_pages_that_are_not_in_the_book_are_left_out() -> None:
    assert parse(epub({"a": page("<p>Tea</p>")}, ["a", "gone", "a"]), LIMIT).text == "Tea"
    far = archive(
        {
            "META-INF/container.xml": b'<c><rootfile full-path="b.opf"/></c>',
            "b.opf": b'<p><item id="a" href="../../etc/passwd" media-type="text/html"/><itemref idref="a"/></p>',
        }
    )
    assert parse(far, LIMIT).text == ""


def test_only_fonts_may_be_encrypted() -> None:
    def encrypted(name: str) -> bytes:
        return f'<encryption><CipherReference URI="{name}"/></encryption>'.encode()

    fonts = {"META-INF/encryption.xml": encrypted("OPS/font.otf")}
    assert parse(epub({"a b": page("<p>Tea</p>")}, **fonts), LIMIT).text == "Tea"
    with pytest.raises(InvalidDocument, match="protected"):
        parse(epub({"a b": page("<p>Tea</p>")}, **{"META-INF/encryption.xml": encrypted("OPS/text/a%20b")}), LIMIT)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"text", "no EPUB"),
        (archive({"a.txt": b"a"}), "without a book"),
        (epub({"a": page("a")})[:-30], "no EPUB"),
        (epub({"a": page("a")}, opf=BILLION), "document type"),
        (epub({"a": b"\xff\xfe\0\xd8" * 50}), "not text"),
    ],
)
def test_other_files_are_refused_with_a_reason(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        parse(data, LIMIT)


def test_bombs_are_too_large() -> None:
    with pytest.raises(TooLarge, match="over 100000 bytes"):
        parse(epub({name: page("<p>" + "a" * 60_000) for name in "ab"}), LIMIT)

"""HTML: visible content is kept, what surrounds it is left out, and no page is left empty."""

from __future__ import annotations

import pytest

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.html import parse

LIMIT = 100_000


def text(page: str) -> str:
    return parse(page.encode(), LIMIT).text


def test_headings_paragraphs_lists_and_tables_keep_their_shape() -> None:
    page = """<!doctype html><html lang="en-GB"><head><title>Opening \n hours</title><style>p {}</style></head><body>
        <h1>Hours</h1><p>We are   open <b>most</b>
        days.<p>Ring twice.<h2>Days</h2><ul><li>Monday<li><p>Friday</p></ul>
        <table><thead><tr><th>Day<th>From</thead><tr><td>Monday<td>9<tr><td>Friday<td>10</table>
        <pre>one\n  two\n</pre>first<br>second<script>alert(1)</script></body></html>"""
    parsed = parse(page.encode(), LIMIT)
    assert parsed.title == "Opening hours"
    assert parsed.metadata == {"format": "html", "language": "en-GB"}
    assert parsed.text.split("\n\n") == [
        "# Hours",
        "We are open most days.",
        "Ring twice.",
        "## Days",
        "- Monday\n- Friday",
        "Day | From\nMonday | 9\nFriday | 10",
        "one\n  two",
        "first\nsecond",
    ]


def test_the_title_is_the_first_heading_where_the_page_has_none() -> None:
    assert parse(b"<title> </title><p>x<h1>The <i>yard</i></h1><h1>Other</h1>", LIMIT).title == "The yard"
    assert parse(b"<p>x<svg><title>Logo</title></svg>", LIMIT).title == ""


@pytest.mark.parametrize(
    "unseen",
    [
        "<script>GONE</script>", "<style>GONE</style>", "<template>GONE</template>", "<noscript>GONE</noscript>",
        "<p hidden>GONE</p>", '<p style="color: red; DISPLAY : none">GONE</p>', "<!-- GONE -->",
        "<dialog>GONE</dialog>", '<p style="visibility:hidden"><b>GONE</b></p>', '<i aria-hidden="true">GONE</i>',
        "<svg><text>GONE</text></svg>", '<i style="display:inline-block;width:0;overflow:hidden">GONE</i>',
        '<div style="max-height: 0px; font-size: 1px; overflow: hidden">GONE</div>', '<i role="doc-pagebreak">9</i>',
        "<select><option>GONE</select>", "<iframe>GONE</iframe>", '<h2><a href="#kept">¶</a></h2>',
    ],
)  # fmt: skip
def test_invisible_elements_are_left_out(unseen: str) -> None:
    assert text(f"<p>kept</p>{unseen}<p>kept") == "kept\n\nkept"


def test_a_paragraph_sign_that_is_no_link_stays() -> None:
    assert text("<p>by <b>§</b> 5 and <a href='#5'>section 5</a>") == "by § 5 and section 5"


def test_what_surrounds_the_content_is_left_out() -> None:
    page = """<header>Shop logo</header><nav><ul><li>Home<li>Prices</ul></nav><div role="navigation">Crumbs</div>
        <main><header>By Ada</header><h1>Prices</h1><p>Tea is 2.</p><aside>Note</aside><nav>On this page</nav></main>
        <div>Others also read</div><footer>Imprint</footer>"""
    assert text(page) == "By Ada\n\n# Prices\n\nTea is 2.\n\nNote"


def test_the_head_and_the_notes_of_a_section_are_its_own() -> None:
    section = "<section><div><header><h2>Fees</h2></header>5 crowns<aside>1. a year</aside></div></section>"
    assert text(f"<header>Shop</header>{section}<aside>News</aside>") == "## Fees\n\n5 crowns\n\n1. a year"


def test_a_box_of_some_width_is_seen() -> None:
    assert text('<p style="min-width:0;overflow:hidden">a <b style="width:0.5em;overflow:hidden">b</b>') == "a b"


def test_a_heading_of_two_lines_is_one_heading() -> None:
    assert text("<h1>Chapter 1<br>The yard</h1><p>Tea") == "# Chapter 1 The yard\n\nTea"


def test_a_page_of_xml_is_read_as_xml() -> None:
    page = (
        "<?xml version='1.0'?><html><head><title/></head><body><a id='x'/><p>if <![CDATA[a < b &]]> c</p></body></html>"
    )
    assert text(page) == "if a < b & c"


def test_boxes_are_apart_from_the_words_before_them() -> None:
    page = "<label><input type=checkbox checked>Tea</label><label><input type=checkbox>Cake</label>"
    assert text(page) == "[x] Tea [ ] Cake"


@pytest.mark.parametrize(
    ("sheet", "page", "read"),
    [
        (
            "h2 {counter-increment: s} h2::before {content: counter(s) '. '}",
            "<h2>Tea</h2><h2>Cake</h2>",
            "## 1. Tea\n\n## 2. Cake",
        ),
        (
            "body {counter-reset: c 2} h1 {counter-increment: c; counter-reset: s} h2 {counter-increment: s}"
            "h1:before {content: 'Part ' counter(c, upper-roman) ': '}"
            "h2:before {content: counter(c) '.' counter(s) ' '}",
            "<h1>A</h1><h2>a</h2><h2>b</h2><h1>B</h1><h2>c</h2>",
            "# Part III: A\n\n## 3.1 a\n\n## 3.2 b\n\n# Part IV: B\n\n## 4.1 c",
        ),
        (
            "ol {counter-reset: i; list-style: none} li {counter-increment: i}"
            "li:before {content: counters(i, '.') ' '}",
            "<ol><li>a<ol><li>b<li>c</ol><li>d</ol>",
            "- 1 a\n- 1.1 b\n- 1.2 c\n- 2 d",
        ),
        (
            ".kg::after {content: '\\a0 kg'} .eur::before {content: '€'} p .no {display: none}",
            "<p class=eur>5</p><p>7<b class=kg></b><b class='no kg'>9</b>",
            "€5\n\n7 kg",
        ),
        ("p::before {content: '→ '} b::after {content: '\\f005'} i::before {content: 'x'}", "<p>a<b></b><i></i>", "a"),
        (
            ".line {display: block}",
            "<p>Price<b class=line>50</b>60</p><h2>A <i class=line>b</i></h2>",
            "Price\n50\n60\n\n## A b",
        ),
    ],
)
def test_what_style_sheets_write_is_read(sheet: str, page: str, read: str) -> None:
    assert text(f"<style>{sheet}</style>{page}") == read


def test_signs_of_fonts_are_characters() -> None:
    arrow, less = (
        "<i style='font-family:Wingdings'>à<b style='font:7pt \"Arial\"'>à</b></i>",
        "<font face=Symbol>£</font>",
    )
    assert text(f"<p>{arrow} {less} 5 à") == "→à ≤ 5 à"


def test_main_must_hold_a_fair_part_of_the_text() -> None:
    body = "<p>" + "The text is out here. " * 10
    assert text(f"<main>Loading</main>{body}").startswith("Loading\n\nThe text is out here.")


@pytest.mark.parametrize(
    "page",
    [
        "<nav>All there is</nav>", "<header><h1>All</h1> there is</header>", "<footer>All there is</footer>",
        "All there is", "<article>All there is</article>", '<div role="banner">All there is</div><p></p>',
        "<table><tr><td>All there is</table>", "<body aria-hidden='true'><div aria-hidden='true'>All there is</div>",
    ],
)  # fmt: skip
def test_a_page_is_never_left_empty(page: str) -> None:
    assert text(page).replace("# ", "").split() == ["All", "there", "is"]


def test_a_page_laid_out_by_tables_is_read_block_by_block() -> None:
    long = "A sentence of the page. " * 60
    assert text(f"<table><tr><td>Menu<td><h2>Head</h2><p>{long}</table>").split("\n\n")[:2] == ["Menu", "## Head"]


def test_unclosed_tags_end_where_a_browser_ends_them() -> None:
    assert text("<div hidden><p>gone</div><p>kept <b>bold<p>more</div></i>") == "kept bold\n\nmore"


# Bytes


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("", "utf-8"), ("", "utf-8-sig"), ("", "utf-16"), ("", "cp1252"), ('<meta charset="koi8-r">', "koi8-r"),
        ("<meta charset=shift_jis>", "shift_jis"), ("<meta charset=utf-8>", "utf-16"),
        ("<meta charset=nonsense>", "utf-8"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=iso-8859-1">', "cp1252"),
        ("<meta charset=utf-16>", "utf-8"), ("<meta charset=utf-8>", "utf-8"),
    ],
)  # fmt: skip
def test_the_character_set_is_found_as_browsers_find_it(head: str, encoding: str) -> None:
    words = {"koi8-r": "Маяк", "shift_jis": "灯台"}.get(encoding, "Grüße – “so”")
    assert parse(f"{head}<p>{words}</p>".encode(encoding), LIMIT).text == words


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "NUL"),
        (b"<meta charset=utf-8>" + bytes(range(128, 256)), "not text in utf-8"),
        (bytes(range(1, 9)) * 9, "control characters"),
        (b"\xff\xfe" + b"\0\xd8" * 9, "not text in utf-16"),
    ],
)
def test_what_is_not_text_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        parse(data, LIMIT)


def test_nesting_has_no_limit() -> None:
    assert text("<div>" * 5000 + "deep") == "deep"
    assert "deep" in text("<table><tr><td>" * 1000 + "deep")


def test_text_over_the_limit_is_too_large() -> None:
    with pytest.raises(TooLarge, match="10 bytes"):
        parse(b"<p>A little too long</p>", 10)

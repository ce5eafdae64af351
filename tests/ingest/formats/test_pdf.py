"""PDF: text page by page; scans, passwords and other files are refused with a reason, a bad page stops no other."""

from __future__ import annotations

import pytest

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.pdf import parse
from tests.ingest.formats.files import packed, painted, pdf, stream

LIMIT = 100_000
LOCKED = b"/Encrypt << /Filter /Standard /V 2 /R 3 /Length 128 /O (%s) /U (%s) /P -4 >> /ID [(a) (a)]" % (
    b"o" * 32,
    b"u" * 32,
)
AES = (
    b"/Encrypt << /Filter /Standard /V 5 /R 6 /Length 256 /O (%s) /U (%s) /OE (%s) /UE (%s) /Perms (%s) /P -4 /StmF /F "
    b"/StrF /F /CF << /F << /CFM /AESV3 /Length 32 >> >> >> /ID [(a) (a)]"
) % (b"o" * 48, b"u" * 48, b"e" * 32, b"e" * 32, b"p" * 16)


def test_pages_are_paragraphs_and_counted() -> None:
    parsed = parse(pdf("Calloway (Yard)", "", "Founded 1890.", info={"Title": "The  Yard"}), LIMIT)
    assert parsed[:3] == ("The Yard", "Calloway (Yard)\n\nFounded 1890.", {"format": "pdf", "pages": 3})
    assert parsed.pages == ((0, 1), (17, 3)), "the empty second page keeps its number"


def test_lines_that_go_on_in_lower_case_are_joined() -> None:
    page = "The keeper was\nborn in Lind-\nmouth.\nhe said\nSo. And\n- one\n- two"
    assert parse(pdf(page), LIMIT).text == "The keeper was born in Lindmouth.\nhe said\nSo. And\n- one\n- two"


def test_a_space_that_is_painted_as_several_blanks_is_one() -> None:
    shown = parse(pdf("They \t\xa0are\t\tlovely."), LIMIT).text
    assert shown == "They are lovely."


def test_packed_streams_are_read() -> None:
    assert parse(pdf(packed(painted("Tea"))), LIMIT).text == "Tea"


@pytest.mark.parametrize("title", ["untitled", "Microsoft Word - draft.doc", "main.dvi", " ", "(anonymous)"])
def test_a_meaningless_title_is_dropped(title: str) -> None:
    assert parse(pdf("Tea", info={"Title": title}), LIMIT).title == ""


@pytest.mark.parametrize(
    "data",
    [pdf(stream(b"q 100 0 0 100 0 0 cm /I1 Do Q")), pdf("", " ")],
    ids=["image", "white space"],
)
def test_a_scan_needs_ocr_first(data: bytes) -> None:
    with pytest.raises(InvalidDocument, match=r"no text in it; scanned pages need OCR first \(RAGKV_OCR=true with"):
        parse(data, LIMIT)


def test_more_scans_than_allowed_are_refused_before_any_is_read() -> None:
    scan = stream(b"q 100 0 0 100 0 0 cm /I1 Do Q")
    with pytest.raises(TooLarge, match=r"3 of its pages need OCR, the limit is 2 \(ocr\)"):
        parse(pdf(scan, "Tea", scan, scan), LIMIT, ocr_pages=2)


def test_pages_with_text_and_empty_pages_need_no_ocr() -> None:
    parsed = parse(pdf("Tea", stream(b""), "Cake"), LIMIT, ocr_pages=1)
    assert parsed == parse(pdf("Tea", stream(b""), "Cake"), LIMIT)
    assert parsed.metadata == {"format": "pdf", "pages": 3}


def test_a_bad_page_is_named_and_stops_no_other() -> None:
    data = pdf("one", "two", "three").replace(b"[6 0 R 8 0 R", b"[6 0 R 3 0 R")  # a font where a page should be
    parsed = parse(data, LIMIT)
    assert parsed.text == "one\n\nthree"
    assert parsed.metadata == {"format": "pdf", "pages": 3, "unread_pages": [2]}


def test_characters_that_fonts_do_not_name_are_no_text() -> None:
    with pytest.raises(InvalidDocument, match=r"its fonts name no characters; it needs OCR first \(RAGKV_OCR"):
        parse(pdf(stream(b"BT /F1 12 Tf (" + bytes(range(1, 8)) * 4 + b") Tj ET")), LIMIT)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 2000, "is no PDF"),
        (b"PK\3\4 zip", "is no PDF"),
        (pdf("Tea")[:300], "damaged PDF"),
        (b"%PDF-1.7\n" + b"\xff" * 500, "damaged PDF"),
        (pdf("Tea", trailer=LOCKED), "has a password"),
        (pdf("Tea", trailer=AES), "has a password"),
    ],
    ids=["png", "zip", "cut", "garbage", "password", "aes"],
)
def test_unreadable_files_are_refused_with_a_reason(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDocument, match=said):
        parse(data, LIMIT)


def test_words_that_are_set_apart_without_a_space_character_are_words() -> None:
    # As TeX writes lines: the distance between two words is a number in an array of strings.
    shown = b"BT /F1 12 Tf 72 720 Td [(There)-333(is)-333(no)-333(space)-333(character)] TJ ET"
    assert parse(pdf(stream(shown)), LIMIT).text == "There is no space character"


def test_a_flate_bomb_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="no text in it"):
        parse(pdf(packed(b" " * (100 << 20))), 1 << 24)


def test_text_over_the_limit_is_too_large() -> None:
    with pytest.raises(TooLarge, match="10 bytes"):
        parse(pdf("Seven", "letters"), 10)

"""A page is drawn in a confined process, within its limits, and what that process says is not trusted."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import InputError, InvalidDocument, NotFound
from ragkv.ingest.loader import MOST_KEPT, parse, read
from ragkv.ingest.page_pictures import PagePicture, decode_picture, draw_page, page_at
from ragkv.ingest.sandbox import USUAL, Allowance
from ragkv.types import Document
from tests.ingest.formats.files import docx, packed, paragraph, pdf
from tests.ingest.formats.test_page_picture import decoded

LIMIT = 1 << 20
FILE = pdf("The harbour of Tarn.", "", "The bridge of Mell\nwas painted green.")
(PLAN,) = parse(FILE, "plan.pdf", LIMIT)
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 30, 20)
"""The beginning of a picture of 30 x 20 pixels."""


def passage(words: str) -> tuple[int, int]:
    start = PLAN.text.index(words)
    return start, start + len(words)


def draw(number: int, marked: tuple[int, int] = (0, 0), document: Document = PLAN) -> PagePicture:
    return draw_page(document, number, marked, USUAL)


def yellow(picture: PagePicture) -> list[tuple[int, int]]:
    """Return the pixels, across and down, that have the colour of a mark on white."""
    _, _, rows = decoded(picture.png)
    return [
        (at // 3, line)
        for line, row in enumerate(rows)
        for at in range(0, len(row), 3)
        if row[at] > 240 and row[at + 2] < 200
    ]


def test_only_a_pdf_is_kept_with_its_document() -> None:
    assert PLAN.file == FILE
    assert parse(docx(paragraph("Tea")), "tea.docx", LIMIT)[0].file == b""
    assert parse(b"Tea", "tea.txt", LIMIT)[0].file == b""


def test_a_pdf_that_is_too_large_is_read_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_KEPT == 50 * 2**20
    monkeypatch.setattr("ragkv.ingest.loader.MOST_KEPT", len(FILE) - 1)
    (document,) = read(FILE, "plan.pdf", LIMIT)
    assert isinstance(document, Document)
    assert (document.text, document.file) == (PLAN.text, b"")


def test_a_passage_is_marked_on_its_page_alone() -> None:
    marked, bare, other = draw(3, passage("bridge of Mell")), draw(3), draw(1, passage("bridge of Mell"))
    assert (bare.mark, other.mark) == (None, None)
    assert len(yellow(marked)) > 1000
    assert yellow(bare) == yellow(other) == []
    assert {marked.pages, bare.pages, other.pages} == {3}


@pytest.mark.parametrize("box", [b"", b"/Rotate 90", b"/Rotate 180", b"/CropBox [0 700 306 792]"])
def test_where_the_mark_lies_is_told_in_pixels_of_the_picture(box: bytes) -> None:
    picture = draw(3, passage("bridge of Mell"), replace(PLAN, file=FILE.replace(b"/MediaBox", box + b" /MediaBox")))
    across, down = zip(*yellow(picture), strict=True)
    assert picture.mark == pytest.approx((min(across), min(down), max(across), max(down)), abs=2)


def test_a_passage_over_two_pages_is_marked_on_both() -> None:
    whole = (0, len(PLAN.text))
    assert draw(1, whole) == draw(1, passage("The harbour of Tarn."))
    assert draw(3, whole) == draw(3, passage(PLAN.text.split("\n\n")[1]))
    assert draw(3, whole).mark
    assert not draw(2, whole).mark, "there is no text"


def test_the_page_of_a_passage_is_the_one_that_it_begins_on() -> None:
    assert [page_at(PLAN, offset) for offset in (0, 5, passage("The bridge")[0], 10**6)] == [1, 1, 3, 3]
    assert page_at(replace(PLAN, pages=()), 5) == 1


@pytest.mark.parametrize("number", [0, 4, 10**9])
def test_a_page_that_is_not_there_is_not_found(number: int) -> None:
    with pytest.raises(NotFound, match=f"'plan.pdf' has no page {number}"):
        draw(number)


def test_a_document_without_a_file_has_no_pages() -> None:
    with pytest.raises(NotFound, match="has no pages to show"):
        draw(1, document=replace(PLAN, file=b""))


def test_a_file_that_is_no_pdf_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="the page cannot be drawn"):
        draw(1, document=replace(PLAN, file=b"no file"))


def test_a_page_that_never_ends_is_given_up() -> None:
    bomb = replace(PLAN, file=pdf(packed(b"0 0 m 600 0 l 600 700 l 0 700 l h f " * 1_000_000)))
    before = time.monotonic()
    with pytest.raises(InvalidDocument, match=r"longer than 1 s \(parse_seconds\)"):
        draw_page(bomb, 1, (0, 0), Allowance(seconds=1.0))
    assert time.monotonic() - before < 10


def test_where_no_process_can_be_started_the_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> bytes:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("ragkv.ingest.sandbox.run", run)
    with pytest.raises(InvalidDocument, match="no process can be started to draw it: Resource"):
        draw(1)


def test_an_enormous_page_needs_little_memory() -> None:
    enormous = replace(PLAN, file=FILE.replace(b"612 792", b"9e9 9e9"))
    assert draw_page(enormous, 1, (0, 0), Allowance(memory=256 * 2**20)).pages == 3


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"{}",
        b"[]\n" + PNG,
        b'{"kind": "drawn", "mark": null, "pages": 1}\n<svg onload=x>',
        b'{"kind": "drawn", "mark": null, "pages": "many"}\n' + PNG,
        b'{"kind": "drawn", "mark": [1, 2, 3], "pages": 1}\n' + PNG,
        b'{"kind": "drawn", "mark": true, "pages": 1}\n' + PNG,
        b'{"kind": "drawn", "mark": [0, 0, 9, 1e9], "pages": 1}\n' + PNG,
        b'{"kind": "drawn", "mark": [0, 9, 9, 5], "pages": 1}\n' + PNG,
        b'{"kind": "drawn", "mark": [0, 0, 0, Infinity], "pages": 1}\n' + PNG,
        b'{"kind": "drawn"}\n' + PNG,
        b"[" * 100_000,
    ],
)
def test_a_reply_that_makes_no_sense_is_a_damaged_file(reply: bytes) -> None:
    with pytest.raises(InvalidDocument, match="the file is damaged"):
        decode_picture(reply)


@given(st.binary(max_size=200))
def test_any_reply_is_an_input_error_at_most(reply: bytes) -> None:
    with contextlib.suppress(InputError):
        decode_picture(reply)


def test_a_reply_is_decoded() -> None:
    head = json.dumps({"kind": "drawn", "mark": None, "pages": 2}).encode()
    assert decode_picture(head + b"\n" + PNG) == PagePicture(PNG, None, 2)
    assert decode_picture(head.replace(b"null", b"[1, 2, 30, 4]") + b"\n" + PNG) == PagePicture(PNG, (1, 2, 30, 4), 2)
    assert decode_picture(b'{"kind": "missing", "pages": 2}\n') is None
    with pytest.raises(InvalidDocument, match="torn"):
        decode_picture(b'{"kind": "invalid", "words": "torn"}\n')

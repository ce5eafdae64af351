"""Pages as pictures: the words of a passage are found by their letters, and no page becomes a large picture."""

from __future__ import annotations

import struct
import zlib

import pytest
from pypdfium2 import PdfDocument, PdfPage

from ragkv.ingest.formats.page_picture import (
    LONGEST_SIDE,
    MOST_PIXELS,
    WIDTH,
    Box,
    drawn,
    encoded,
    passage_boxes,
)
from ragkv.ingest.formats.pdf import parse
from tests.ingest.formats.files import painted, pdf, stream

PARTS = "The keeper was\nborn in Lind-\nmouth in 1890.\nThe keeper was old."
LINE = 14
"""Points from line to line."""


def opened(data: bytes) -> tuple[PdfPage, str]:
    """Open a file of one page, and what the reader makes of it."""
    return PdfDocument(data)[0], parse(data, 100_000).text


def boxes_of(content: str | bytes, words: str, at: int = 0) -> list[Box]:
    page, text = opened(pdf(content))
    start = text.index(words, at)
    return passage_boxes(page, text, start, start + len(words))


def lines_of(boxes: list[Box]) -> list[int]:
    """Return the numbers of the lines on which the boxes stand."""
    return [round((720 - bottom) / LINE) for _, bottom, _, _ in boxes]


def test_a_passage_of_two_lines_has_two_boxes_also_where_a_word_was_broken() -> None:
    boxes = boxes_of(PARTS, "born in Lindmouth in 1890")
    assert lines_of(boxes) == [1, 2]
    (left, _, right, _), (start, _, end, _) = boxes
    assert left == pytest.approx(72, abs=2)
    assert start == pytest.approx(72, abs=2)
    assert 110 < right < 150, "up to the hyphen"
    assert 120 < end < 170


def test_of_words_that_stand_twice_those_are_marked_that_are_meant() -> None:
    assert lines_of(boxes_of(PARTS, "The keeper was")) == [0]
    assert lines_of(boxes_of(PARTS, "The keeper was", at=20)) == [3]
    page, text = opened(pdf(PARTS))
    shorter = text.replace(" in 1890", "")  # what the reader left out moves the place that is expected
    start = shorter.rindex("The keeper was")
    assert lines_of(passage_boxes(page, shorter, start, start + 14)) == [3]


def test_case_accents_and_signs_do_not_matter() -> None:
    page, _ = opened(pdf("The café of Mell-\nsund"))
    text = "the **Cafe** of Mellsund"
    assert len(passage_boxes(page, text, 0, len(text))) == 2


def test_a_passage_is_found_where_the_reader_left_out_a_line() -> None:
    page, _ = opened(pdf("The harbour of Tarn was built\nHEADER 7\nin 1889 by Ada Brook of Mell"))
    text = "The harbour of Tarn was built in 1889 by Ada Brook of Mell"
    boxes = passage_boxes(page, text, 0, len(text))
    assert {0, 2} <= set(lines_of(boxes))


@pytest.mark.parametrize(
    "words", ["", "Something else, of another document", "?!", "The keeper was born" + " elsewhere" * 9]
)
def test_what_is_not_on_the_page_has_no_boxes(words: str) -> None:
    page, _ = opened(pdf(PARTS))
    assert passage_boxes(page, words, 0, len(words)) == []


def test_the_longest_passage_of_one_letter_is_looked_for_in_linear_time() -> None:
    page, text = opened(pdf("\n".join(["a" * 60] * 50)))
    assert passage_boxes(page, text, 10, len(text) - 10)


def test_a_picture_holds_the_page_and_is_a_png() -> None:
    page, _ = opened(pdf(stream(painted("Tea") + b" 1 0 0 rg 0 0 306 792 re f")))
    width, height, rows = decoded(encoded(drawn(page)))
    assert (width, height) == (WIDTH, 1605)
    middle = rows[height // 2]
    assert middle[:3] == b"\xff\x00\x00", "red at the left"
    assert middle[-3:] == b"\xff\xff\xff", "white at the right"


@pytest.mark.parametrize("box", [b"20000000 30000000", b"1000 4000", b"1 900000", b"900000 1", b".1 .1", b"1e9 1e9"])
def test_a_page_of_any_size_is_a_small_picture(box: bytes) -> None:
    width, height, _ = decoded(encoded(drawn(PdfDocument(pdf("Tea").replace(b"612 792", box))[0])))
    assert 1 <= width <= LONGEST_SIDE
    assert 1 <= height <= LONGEST_SIDE
    assert width * height <= 1.01 * MOST_PIXELS


def decoded(png: bytes) -> tuple[int, int, list[bytes]]:
    """Return width, height and the rows of a PNG whose rows are not filtered."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, data, width, height = 8, b"", 0, 0
    while at < len(png):
        (size,), name = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        content = png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size]) == (zlib.crc32(name + content),)
        if name == b"IHDR":
            width, height, depth, kind = struct.unpack(">IIBB", content[:10])
            assert (depth, kind) == (8, 2)
        data += content if name == b"IDAT" else b""
        at += 12 + size
    pixels, row = zlib.decompress(data), 3 * width + 1
    assert len(pixels) == row * height
    return width, height, [pixels[row * line + 1 : row * (line + 1)] for line in range(height)]

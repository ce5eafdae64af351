"""The process that draws one page of a PDF, with a passage of it marked.

    python -m ragkv.ingest.formats.page_picture NUMBER SECONDS MEMORY <request >reply

The request is a line of JSON and the file: {"text": what the reader made of the page, "start", "end": the passage in
it}. The reply is a line of JSON, with a "kind":

    drawn      "mark": the box around all marks, or null; "pages": how many there are; a PNG behind the line
    missing    there is no such page
    invalid    "words": the message

The reader joins lines, leaves out hyphens and adds signs. So a passage is found by its letters and digits alone.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import sys
import unicodedata
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from pypdfium2 import PdfBitmap, PdfDocument, PdfiumError, PdfPage, raw

from ragkv.ingest.formats.confine import confine

WIDTH = 1240
"""Pixels of a page's width: 150 a side of an inch of A4."""
MOST_PIXELS = 4_000_000
LONGEST_SIDE = 6_000
MOST_LETTERS = 50_000
"""Characters of a page from which on nothing is looked for."""
_LEAST = 12
"""Letters of a part of a passage that is looked for alone."""
_SHARE = 0.5
"""Share of a passage that has to be found."""
_COLOUR = (255, 196, 0, 96)
"""Red, green, blue and opacity of a mark."""

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in points of the page."""


def main(number: int, seconds: float, memory: int) -> bytes:
    """Draw the page with this number, from 1, of the file in the request, and return the reply."""
    confine(seconds, memory)
    request, data = json.loads(sys.stdin.buffer.readline()), sys.stdin.buffer.read()
    try:
        document = PdfDocument(data)
        count = len(document)
        if not 1 <= number <= count:
            return _reply("missing", pages=count)
        document.init_forms()  # what is filled in is a part of the page
        page = document[number - 1]
        boxes = passage_boxes(page, request["text"], request["start"], request["end"])
        for box in boxes:
            _mark(page, box)
        bitmap = drawn(page)
        return _reply("drawn", encoded(bitmap), pages=count, mark=extent(bitmap, page, boxes))
    except MemoryError:
        message = f"drawing the page needs more than {memory // 2**20} MiB of memory (parse_bytes)"
    except PdfiumError as error:
        message = f"the page cannot be drawn: {error}"
    return _reply("invalid", words=message)


def drawn(page: PdfPage) -> PdfBitmap:
    """Draw a page. Pages of any size become at most MOST_PIXELS pixels. Raises PdfiumError if it has no size."""
    width, height = page.get_size()
    if not (math.isfinite(width) and math.isfinite(height)) or width <= 0 or height <= 0:
        raise PdfiumError("it has no size")
    scale = min(WIDTH / width, math.sqrt(MOST_PIXELS / width / height), LONGEST_SIDE / max(width, height))
    return page.render(scale=scale, rev_byteorder=True, prefer_bgrx=False)


def encoded(bitmap: PdfBitmap) -> bytes:
    """Return a drawn page as a PNG."""
    lines = memoryview(bitmap.buffer)
    used = bitmap.width * bitmap.n_channels
    rows = b"".join(
        b"\0" + bytes(lines[at : at + used]) for at in range(0, bitmap.stride * bitmap.height, bitmap.stride)
    )
    kind = {1: 0, 3: 2, 4: 6}[bitmap.n_channels]
    header = struct.pack(">IIBBBBB", bitmap.width, bitmap.height, 8, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_part, *zip(*parts, strict=True)))


def extent(bitmap: PdfBitmap, page: PdfPage, boxes: Sequence[Box]) -> list[int] | None:
    """Return the box around all boxes of a page: left, top, right and bottom in pixels of its picture; None of none."""
    if not boxes:
        return None
    place = bitmap.get_posconv(page).to_bitmap  # knows how the page is turned and cut
    corners = [place(*corner) for box in boxes for corner in (box[:2], box[2:])]
    edges = [
        [min(max(at, 0), size) for at in side]
        for side, size in zip(zip(*corners, strict=True), (bitmap.width, bitmap.height), strict=True)
    ]
    return [bound(side) for bound in (min, max) for side in edges]


def passage_boxes(page: PdfPage, text: str, start: int, end: int) -> list[Box]:
    """Return the boxes around a passage, about one a line; none where it is not on the page.

    Args:
        page: The page.
        text: What was read of it.
        start: Where the passage begins in the text.
        end: Where it ends.
    """
    words = _letters(text[start:end])
    shown = page.get_textpage()
    if not words or shown.count_chars() > MOST_LETTERS:
        return []
    letters, owners = list[str](), list[int]()
    for index in range(shown.count_chars()):
        found = _letters(chr(raw.FPDFText_GetUnicode(shown, index)))
        letters += found
        owners += [index] * len(found)
    spans = list(_spans("".join(letters), words, len(_letters(text[:start]))))
    if sum(stop - first for first, stop in spans) < _SHARE * len(words):
        return []
    return _lines(
        shown.get_charbox(index, loose=True) for first, stop in spans for index in sorted(set(owners[first:stop]))
    )


def _letters(text: str) -> str:
    """Return the letters and digits of a text, without accents and case."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text).casefold()))


def _spans(letters: str, words: str, near: int) -> Iterator[tuple[int, int]]:
    """Yield where words stand in the letters of a page, in the longest parts that stand there.

    near: where they are expected; of several places the nearest is taken.
    """
    least, done = min(_LEAST, len(words)), 0
    while done + least <= len(words):
        if words[done : done + least] not in letters:
            done += 1
            continue
        wanted = range(least + 1, len(words) - done + 1)
        more = bisect_left(wanted, True, key=lambda size: words[done : done + size] not in letters)
        part = words[done : done + least + more]
        at = _nearest(letters, part, near + done)
        yield at, at + len(part)
        done += len(part)


def _nearest(letters: str, part: str, near: int) -> int:
    """Return where a part of the letters stands, nearest to a place."""
    found = (letters.rfind(part, 0, near + len(part)), letters.find(part, near))
    return min((at for at in found if at >= 0), key=lambda at: abs(at - near))


def _lines(boxes: Iterable[Box]) -> list[Box]:
    """Join the boxes of characters that stand side by side."""
    lines = list[Box]()
    for left, bottom, right, top in boxes:
        if right <= left or top <= bottom:
            continue
        if lines and lines[-1][1] < (bottom + top) / 2 < lines[-1][3]:
            last = lines[-1]
            lines[-1] = (min(last[0], left), min(last[1], bottom), max(last[2], right), max(last[3], top))
        else:
            lines.append((left, bottom, right, top))
    return lines


def _mark(page: PdfPage, box: Box) -> None:
    """Lay a translucent box over a page."""
    left, bottom, right, top = box
    mark = raw.FPDFPageObj_CreateNewRect(*map(ctypes.c_float, (left, bottom, right - left, top - bottom)))
    raw.FPDFPageObj_SetFillColor(mark, *_COLOUR)
    raw.FPDFPath_SetDrawMode(mark, raw.FPDF_FILLMODE_WINDING, 0)
    raw.FPDFPage_InsertObject(page, mark)


def _part(name: bytes, content: bytes) -> bytes:
    """Return a part of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _reply(kind: str, picture: bytes = b"", **content: object) -> bytes:
    return json.dumps({"kind": kind, **content}).encode() + b"\n" + picture


if __name__ == "__main__":
    sys.stdout.buffer.write(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
    sys.stdout.buffer.flush()
    os._exit(0)  # nothing is left to clean up

"""Pictures of the pages of a document that came as a PDF, with a passage marked. A confined process draws them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from itertools import pairwise

from ragkv.errors import InvalidDocument, NotFound
from ragkv.ingest import sandbox
from ragkv.ingest.sandbox import Allowance
from ragkv.types import Document

MOST_BYTES = 16 * 2**20
"""Of a picture."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_DAMAGED = "drawing the page crashed; the file is damaged"


@dataclass(frozen=True)
class PagePicture:
    """A page as a picture.

    Attributes:
        png: The picture.
        mark: Left, top, right and bottom of the box around all that is marked, in pixels; None if the passage was not
            found on the page.
        pages: How many pages the document has.
    """

    png: bytes
    mark: tuple[int, int, int, int] | None
    pages: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the picture, in pixels."""
        return int.from_bytes(self.png[16:20]), int.from_bytes(self.png[20:24])


def draw_page(document: Document, number: int, passage: tuple[int, int], allowed: Allowance) -> PagePicture:
    """Draw a page.

    Args:
        document: The document, with its file.
        number: Number of the page, from 1.
        passage: Offsets into the document's text: what is marked, as far as it is on the page. (0, 0): nothing.
        allowed: What drawing may take.

    Raises:
        NotFound: The document has no file or no such page.
        InvalidDocument: The page cannot be drawn within the limits, or no process can be started.
        TooLarge: Its picture has more than MOST_BYTES.
    """
    if not document.file:
        raise NotFound(f"document {document.id!r} has no pages to show: only PDF files are kept, from their ingest on")
    low, high = _extent(document, number)
    start, end = (min(max(offset, low), high) - low for offset in passage)
    request = json.dumps({"text": document.text[low:high], "start": start, "end": end}).encode()
    file = io.BytesIO(request + b"\n" + document.file)
    arguments = [str(number), repr(allowed.seconds), str(allowed.memory)]
    try:
        reply = sandbox.run("ragkv.ingest.formats.page_picture", arguments, file, MOST_BYTES, allowed.seconds)
    except OSError as error:
        raise InvalidDocument(f"no process can be started to draw it: {error.strerror}; try again later") from None
    picture = decode_picture(reply)
    if picture is None:
        raise NotFound(f"document {document.id!r} has no page {number}")
    return picture


def page_at(document: Document, offset: int) -> int:
    """Return the number of the page on which the character at this offset of the text stands; 1 if that is not told."""
    return max((number for start, number in document.pages if start <= offset), default=1)


def decode_picture(reply: bytes) -> PagePicture | None:
    """Decode the reply of the child, which is not trusted. None: there is no such page. Raises InvalidDocument."""
    head, _, png = reply.partition(b"\n")
    try:
        content = json.loads(head)
        kind = content["kind"]
        if kind == "missing":
            return None
        if kind == "drawn" and png.startswith(_SIGNATURE):
            picture = PagePicture(png, content["mark"] and _box(*content["mark"]), int(content["pages"]))
            if _lies_within(picture):
                return picture
            raise ValueError
        message = str(content["words"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise InvalidDocument(_DAMAGED) from None
    raise InvalidDocument(message)


def _box(left: int, top: int, right: int, bottom: int) -> tuple[int, int, int, int]:
    return int(left), int(top), int(right), int(bottom)


def _lies_within(picture: PagePicture) -> bool:
    """Whether the mark of a picture lies in it."""
    if picture.mark is None:
        return True
    left, top, right, bottom = picture.mark
    width, height = picture.size
    return 0 <= left <= right <= width and 0 <= top <= bottom <= height


def _extent(document: Document, number: int) -> tuple[int, int]:
    """Return where a page begins and ends in the text; (0, 0) where it has none."""
    ends = [*document.pages, (len(document.text), 0)]
    return next(((low, high) for (low, page), (high, _) in pairwise(ends) if page == number), (0, 0))

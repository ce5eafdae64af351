"""PDF to text, page by page, with PDFium. Pages are separated by an empty line.

A PDF says where letters are painted, and not what is a word or a paragraph, so lines end where they end on the page.
Where the next line goes on in lower case the two are joined, and so are the halves of a hyphenated word.
"""

from __future__ import annotations

import re

from pypdfium2 import PdfDocument, PdfiumError
from pypdfium2.raw import FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY

from ingest.formats.base import Parsed, TextRoom, one_line, without_controls
from ragkv.errors import InvalidDocument

UNREADABLE_SHARE = 0.1
"""Share of unreadable characters above which a page counts as unreadable: its fonts name no characters."""
_HEADER_WITHIN = 1024
_HYPHEN = "\ufffe"
"""What PDFium gives for a hyphen at the end of a line."""
_REASONS = {
    FPDF_ERR_PASSWORD: "it has a password; save it without one",
    FPDF_ERR_SECURITY: "it is encrypted; save it without a password and without restrictions",
}
_BETWEEN = "\n\n"
"""Separates pages."""
_NO_TITLE = re.compile(r"untitled.*|.*\.(docx?|odt|rtf|tex|dvi|indd|pptx?|xlsx?|pdf|ps|qxd)", re.IGNORECASE)


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a PDF. The title comes from its properties; the metadata holds the page count and any unread pages.

    Raises:
        InvalidDocument: The file is no PDF, needs a password or has no text.
        TooLarge: The text has over `limit` bytes.
    """
    if b"%PDF-" not in data[:_HEADER_WITHIN]:
        raise InvalidDocument("it is no PDF")
    try:
        document = PdfDocument(data)
        pages = len(document)
        title = one_line(document.get_metadata_value("Title"))
    except PdfiumError as error:
        raise InvalidDocument(_REASONS.get(error.err_code, "it is a damaged PDF")) from None
    text, starts, unread = _text(document, pages, TextRoom(limit))
    metadata = {"format": "pdf", "pages": pages, **({"unread_pages": unread} if unread else {})}
    return Parsed("" if _NO_TITLE.fullmatch(title) else title, text, metadata, starts)


def _text(document: PdfDocument, pages: int, room: TextRoom) -> tuple[str, tuple[tuple[int, int], ...], list[int]]:
    """Return the text of all pages, (offset, number) of each page, and the numbers of the unread ones.

    Numbers count from 1. A bad page stops no other.
    """
    texts: list[str] = []
    starts: list[tuple[int, int]] = []
    length = 0
    unread: list[int] = []
    fault = ""
    for number in range(pages):
        try:
            painted = document[number].get_textpage().get_text_bounded()
        except PdfiumError as error:
            unread.append(number + 1)
            fault = str(error)
            continue
        painted = painted.replace("\r\n", "\n").replace(_HYPHEN, "-")
        clean = without_controls(painted)
        if len(painted) - len(clean) + clean.count("\ufffd") > UNREADABLE_SHARE * len(painted):
            unread.append(number + 1)
            fault = "its fonts name no characters; it needs OCR first"
            continue
        if page := _flow(clean):
            starts.append((length, number + 1))
            texts.append(room.take(page))
            length += len(page) + len(_BETWEEN)
    if not texts:
        raise InvalidDocument(f"there is no text in it; {fault or 'scanned pages need OCR first'}")
    return _BETWEEN.join(texts), tuple(starts), unread


def _flow(page: str) -> str:
    """Join the lines of a page where a sentence or a word goes on."""
    lines: list[str] = []
    for line in (line.strip() for line in page.split("\n")):
        before = lines[-1] if lines else ""
        if not line[:1].islower() or not before or before[-1] in ".!?:":
            lines.append(line)
        elif before.endswith("-") and before[-2:-1].islower():
            lines[-1] = before[:-1] + line
        else:
            lines[-1] = f"{before} {line}"
    return "\n".join(lines).strip()

"""PDF to text, page by page, with PDFium. Pages are separated by an empty line.

A PDF says where letters are painted, and not what is a word or a paragraph. Lines are joined where a sentence or a word
goes on (pdf_lines.py). Text that is painted smaller and higher or lower than what is before it is above or below the
line (pdf_scripts.py).

With OCR (ocr.py), pages that show something but have no text, or text that cannot be read, are read from their picture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pypdfium2 import PdfDocument, PdfiumError, PdfPage
from pypdfium2.raw import FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY, FPDFPage_CountObjects

from ragkv.errors import InvalidDocument, TooLarge
from ragkv.ingest.formats.base import Parsed, TextRoom, one_line, without_controls
from ragkv.ingest.formats.pdf_lines import BROKEN, Spelling, flow
from ragkv.ingest.formats.pdf_scripts import with_scripts

UNREADABLE_SHARE = 0.1
"""Share of unreadable characters above which a page counts as unreadable: its fonts name no characters."""
_HEADER_WITHIN = 1024
_HYPHEN = "\ufffe"
"""What PDFium gives for a hyphen at the end of a line."""
_REASONS = {
    FPDF_ERR_PASSWORD: "it has a password; save it without one",
    FPDF_ERR_SECURITY: "it is encrypted; save it without a password and without restrictions",
}
_OCR = "RAGKV_OCR=true with the extra ragkv[ocr] reads them"
_BLANKS = re.compile(r"(?<![ \xa0])[ \xa0]*+[\t\r][\t\r \xa0]*+")
_BETWEEN = "\n\n"
"""Separates pages."""
_NO_TITLE = re.compile(
    r"untitled.*|\((?:anonymous|unspecified)\)|.*\.(docx?|odt|rtf|tex|dvi|indd|pptx?|xlsx?|pdf|ps|qxd)", re.IGNORECASE
)


@dataclass
class _Pages:
    """What was read of the pages, by their number from 1.

    Attributes:
        texts: The texts.
        faults: Why other pages have none.
        scans: Pages that OCR should read.
    """

    texts: dict[int, str] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    scans: list[int] = field(default_factory=list)


def parse(data: bytes, limit: int, ocr_pages: int = 0) -> Parsed:
    """Parse a PDF. The title comes from its properties.

    The metadata holds the page count, any unread pages, and the pages that OCR read.

    Args:
        data: The file.
        limit: Most bytes of its text.
        ocr_pages: Most pages that OCR may read; 0: no OCR.

    Raises:
        InvalidDocument: The file is no PDF, needs a password or has no text.
        TooLarge: The text has over `limit` bytes, or more than `ocr_pages` pages need OCR.
    """
    if b"%PDF-" not in data[:_HEADER_WITHIN]:
        raise InvalidDocument("it is no PDF")
    try:
        document = PdfDocument(data)
        count = len(document)
        title = one_line(document.get_metadata_value("Title"))
    except PdfiumError as error:
        raise InvalidDocument(_REASONS.get(error.err_code, "it is a damaged PDF")) from None
    room = TextRoom(limit)
    pages = _painted(document, count, room)
    metadata: dict[str, object] = {"format": "pdf", "pages": count}
    if ocr_pages and pages.scans:
        _read_scans(document, pages, room, ocr_pages)
        metadata["ocr_pages"] = [number for number in pages.scans if number in pages.texts]
    text, starts = _joined(pages, bool(ocr_pages))
    if pages.faults:
        metadata["unread_pages"] = sorted(pages.faults)
    return Parsed("" if _NO_TITLE.fullmatch(title) else title, text, metadata, starts)


def _painted(document: PdfDocument, count: int, room: TextRoom) -> _Pages:
    """Read the text that the pages hold. A bad page stops no other."""
    pages = _Pages()
    for number in range(1, count + 1):
        try:
            page = document[number - 1]
            painted = with_scripts(page)
        except PdfiumError as error:
            pages.faults[number] = str(error)
            continue
        painted = painted.replace("\r\n", "\n").replace(_HYPHEN, BROKEN)
        if "\t" in painted or "\r" in painted:  # some programs write each space as several blanks
            painted = _BLANKS.sub(" ", painted)
        clean = without_controls(painted.replace(BROKEN, _HYPHEN)).replace(_HYPHEN, BROKEN)
        if len(painted) - len(clean) + clean.count("\ufffd") > UNREADABLE_SHARE * len(painted):
            pages.faults[number] = "its fonts name no characters; it needs OCR first"
            pages.scans.append(number)
        elif text := clean.strip():
            pages.texts[number] = room.take(text)
        elif _shows_something(page):
            pages.scans.append(number)
    spelling = Spelling(pages.texts.values()) if any(map(_breaks_words, pages.texts.values())) else None
    pages.texts = {number: flow(text, spelling) for number, text in pages.texts.items()}
    return pages


def _breaks_words(page: str) -> bool:
    return BROKEN in page or "-\n" in page or "‐\n" in page


def _shows_something(page: PdfPage) -> bool:
    return bool(FPDFPage_CountObjects(page) > 0)


def _read_scans(document: PdfDocument, pages: _Pages, room: TextRoom, most: int) -> None:
    """Read the scans by OCR. Raises InvalidDocument and TooLarge."""
    from ragkv.ingest.formats.ocr import Reader

    if len(pages.scans) > most:
        raise TooLarge(f"{len(pages.scans)} of its pages need OCR, the limit is {most} (ocr)")
    reader = Reader()
    for number in pages.scans:
        try:
            text = flow(without_controls(reader.read(document[number - 1])))
        except (PdfiumError, InvalidDocument) as error:
            pages.faults[number] = str(error)
            continue
        if text:
            pages.texts[number] = room.take(text)
            pages.faults.pop(number, None)
        else:
            pages.faults[number] = "OCR found none"


def _joined(pages: _Pages, ocr: bool) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the text of all pages, and (offset, number) of each page. Raises InvalidDocument if there is none."""
    if not pages.texts:
        fault = next(reversed(pages.faults.values()), "")
        if not ocr and (pages.scans or not fault):
            fault = (
                f"{pages.faults.get(pages.scans[-1] if pages.scans else 0, 'scanned pages need OCR first')} ({_OCR})"
            )
        raise InvalidDocument(f"there is no text in it{fault and f'; {fault}'}")
    texts: list[str] = []
    starts: list[tuple[int, int]] = []
    length = 0
    for number, text in sorted(pages.texts.items()):
        starts.append((length, number))
        texts.append(text)
        length += len(text) + len(_BETWEEN)
    return _BETWEEN.join(texts), tuple(starts)

"""The process that parses one document.

    python -m ragkv.ingest.formats FORMAT LIMIT SECONDS MEMORY OCR_PAGES <file >reply

The reply is one JSON object. Its "kind" is "parsed", with "title", "text", "metadata" and "pages", or "invalid" or
"large", with "words": the message.
"""

from __future__ import annotations

import functools
import json
import os
import sys

from ragkv.errors import InputError, InvalidDocument, TooLarge
from ragkv.ingest.formats.base import Parsed, Parser
from ragkv.ingest.formats.confine import confine


def parser_of(name: str, ocr_pages: int = 0) -> Parser:
    """Import and return the parser of a format. The libraries of other formats are not imported."""
    match name:
        case "html":
            from ragkv.ingest.formats.html import parse
        case "pdf":
            from ragkv.ingest.formats.pdf import parse as parse_pdf

            parse = functools.partial(parse_pdf, ocr_pages=ocr_pages)
        case "docx":
            from ragkv.ingest.formats.docx import parse
        case "csv":
            from ragkv.ingest.formats.csv import parse
        case "pptx":
            from ragkv.ingest.formats.pptx import parse
        case "xlsx":
            from ragkv.ingest.formats.xlsx import parse
        case "epub":
            from ragkv.ingest.formats.epub import parse
        case "eml":
            from ragkv.ingest.formats.eml import parse
        case _:
            raise ValueError(name)
    return parse


def main(name: str, limit: int, seconds: float, memory: int, ocr_pages: int) -> bytes:
    """Parse standard input as a file of this format and return the reply."""
    parse = parser_of(name, ocr_pages)
    confine(seconds, memory)
    try:
        parsed = read(parse, limit)
        content = {"title": parsed.title, "text": parsed.text, "metadata": dict(parsed.metadata), "pages": parsed.pages}
        return reply("parsed", **content)
    except InputError as fault:
        return reply("large" if isinstance(fault, TooLarge) else "invalid", words=str(fault))
    except MemoryError:
        message = f"reading it needs more than {memory // 2**20} MiB of memory (parse_bytes)"
    except Exception as error:  # whatever a damaged file makes a library raise
        message = f"it cannot be read as {name}: {type(error).__name__}: {str(error)[:200]}"
    return reply("invalid", words=message)


def read(parse: Parser, limit: int) -> Parsed:
    """Parse standard input. Raises InvalidDocument and TooLarge."""
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise TooLarge(f"it has over {limit} bytes (max_document_bytes)")
    if not data:
        raise InvalidDocument("it is empty")
    parsed = parse(data, limit)
    if not parsed.text.strip():
        raise InvalidDocument("there is no text in it")
    size = len(parsed.text.encode())
    if size > limit:
        raise TooLarge(f"its text has {size} bytes, the limit is {limit} (max_document_bytes)")
    return parsed


def reply(kind: str, **content: object) -> bytes:
    """Encode a reply as JSON."""
    return json.dumps({"kind": kind, **content}, ensure_ascii=False).encode(errors="replace")


if __name__ == "__main__":
    _, name, limit, seconds, memory, ocr_pages = sys.argv
    sys.stdout.buffer.write(main(name, int(limit), float(seconds), int(memory), int(ocr_pages)))
    sys.stdout.buffer.flush()
    os._exit(0)  # nothing is left to clean up, and freeing a large tree takes time

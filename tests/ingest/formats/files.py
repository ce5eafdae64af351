"""Small PDF and Word files, made on the spot."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from html import escape

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
_FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
IMAGE = b"<< /Type /XObject /Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray /BitsPerComponent 8 /Length 1 >>"


def stream(data: bytes, entries: bytes = b"") -> bytes:
    """Make a PDF stream object."""
    return b"<< %s /Length %d >>\nstream\n%s\nendstream" % (entries, len(data), data)


def packed(data: bytes) -> bytes:
    """Make a deflated PDF stream object."""
    return stream(zlib.compress(data, 9), b"/Filter /FlateDecode")


def painted(text: str) -> bytes:
    """Make the content stream of a page that paints these lines."""
    lines = text.split("\n")
    escaped = [line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)") for line in lines]
    shown = " ".join(f"({line}) Tj 0 -14 Td" for line in escaped)
    return f"BT /F1 12 Tf 72 720 Td {shown} ET".encode("cp1252")


def pdf(*pages: str | bytes, info: Mapping[str, str] | None = None, trailer: bytes = b"") -> bytes:
    """Make a PDF with one page per argument: text to paint, or a whole stream object."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", _FONT, IMAGE[:-2] + b">>\nstream\n\0\nendstream"]
    kids = []
    for page in pages:
        objects.append(page if isinstance(page, bytes) else stream(painted(page)))
        contents = len(objects)
        resources = b"<< /Font << /F1 3 0 R >> /XObject << /I1 4 0 R >> >>"
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources %s /Contents %d 0 R >>"
            % (resources, contents)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(kids))
    if info:
        entries = " ".join(f"/{key} ({value})" for key, value in info.items())
        objects.append(f"<< {entries} >>".encode("cp1252"))
        trailer += b" /Info %d 0 R" % len(objects)
    return _assembled(objects, trailer)


def _assembled(objects: Sequence[bytes], trailer: bytes) -> bytes:
    out, offsets = io.BytesIO(), []
    out.write(b"%PDF-1.7\n")
    for number, body in enumerate(objects, start=1):
        offsets.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    for offset in offsets:
        out.write(b"%010d 00000 n \n" % offset)
    out.write(b"trailer\n<< /Size %d /Root 1 0 R %s >>\n" % (len(objects) + 1, trailer))
    out.write(b"startxref\n%d\n%%%%EOF\n" % start)
    return out.getvalue()


def archive(parts: Mapping[str, bytes]) -> bytes:
    """Make a zip archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as package:
        for name, data in parts.items():
            package.writestr(name, data)
    return out.getvalue()


def paragraph(text: str, style: str = "", more: str = "") -> str:
    """Make a Word paragraph of one run. more: further properties, as XML."""
    named = f'<w:pStyle w:val="{style}"/>' if style else ""
    return f"<w:p><w:pPr>{named}{more}</w:pPr><w:r><w:t>{escape(text)}</w:t></w:r></w:p>"


def table(*rows: Sequence[str]) -> str:
    """Make a Word table. Each cell is one paragraph."""
    xml = "".join("<w:tr>" + "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in row) + "</w:tr>" for row in rows)
    return f"<w:tbl>{xml}</w:tbl>"


def docx(body: str, title: str = "", styles: str = "", before: str = "", space: str = W, **parts: str) -> bytes:
    """Make a Word document. body, styles, parts (notes): XML inside their roots; before: XML ahead of the root."""
    names = f'xmlns:w="{space}" xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    files = {
        "[Content_Types].xml": b'<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
        "_rels/.rels": (
            '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
            f'<Relationship Id="r1" Type="{_OFFICE}" Target="word/document.xml"/></Relationships>'
        ).encode(),
        "word/document.xml": f"{before}<w:document {names}><w:body>{body}</w:body></w:document>".encode(),
        "word/styles.xml": f"<w:styles {names}>{styles}</w:styles>".encode(),
    }
    if title:
        core = "http://schemas.openxmlformats.org/package/2006/metadata/core-properties"
        dublin = "http://purl.org/dc/elements/1.1/"
        xml = (
            f'<cp:coreProperties xmlns:cp="{core}" xmlns:dc="{dublin}"><dc:title>{title}</dc:title></cp:coreProperties>'
        )
        files["docProps/core.xml"] = xml.encode()
    for name, content in parts.items():
        files[f"word/{name}.xml"] = f"<w:{name} {names}>{content}</w:{name}>".encode()
    return archive(files)

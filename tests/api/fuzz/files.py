"""Files of every format with hostile contents, and the multipart forms that carry them."""

from __future__ import annotations

import io
import json
import zipfile
from html import escape

from hypothesis import strategies as st

from tests.api.fuzz.hostile import DEPTHS, STRANGE, deep_json, mutated, runs, texts, values
from tests.ingest.formats.files import archive, docx, paragraph, pdf, stream, table
from tests.ingest.formats.packages import epub, pptx, row, shape, xlsx

WRITTEN = ("txt", "md", "html", "csv", "jsonl")
SUFFIXES = (*WRITTEN, *WRITTEN, "xlsx", "docx", "pptx", "epub", "eml", "pdf")
"""Formats by their suffixes; those that are read in the service itself twice as often."""
LINE = {"id": "line", "text": "The harbour of Tarn was built in 1889.", "title": "Tarn", "metadata": {"year": 1889}}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "cp1252", "utf-7")
ZEROS = 3 * 2**20
"""Unpacked bytes of a zip bomb that packs into three kilobytes."""


def encoded(text: str, encoding: str = "utf-8") -> bytes:
    """Encode a text; what the encoding does not have is left out."""
    return text.encode(encoding, "ignore")


def plain() -> st.SearchStrategy[bytes]:
    """A text file in some encoding, or bytes of none."""
    return st.builds(encoded, texts(), st.sampled_from(ENCODINGS)) | st.binary(max_size=200)


def markdown() -> st.SearchStrategy[bytes]:
    """A Markdown file whose title is to be found in hostile text."""
    head = st.sampled_from(("", "", "# a", "---\n", "```\n", "<!--", "Title\n", "[a]: ", "| a | b |\n| - | - |\n"))
    return st.builds(lambda start, text: encoded(start + text), head, texts())


def web_page() -> st.SearchStrategy[bytes]:
    """Nested, unclosed and odd markup."""
    tag = st.sampled_from(
        ("div", "table", "a", "b", "p", "li", "svg", "template", "select", "font", "x-y", "script", "pre")
    )
    nest = st.builds(
        lambda name, count, closed: (f"<{name}>" * count)[:30_000] + "a" + (f"</{name}>" * count)[:25_000] * closed,
        tag,
        st.sampled_from(DEPTHS),
        st.booleans(),
    )
    attributes = texts().map(lambda text: f'<a href="{text[:50_000]}" {text[:500]}>a</a>')
    named = st.sampled_from(("utf-7", "utf-16", "x" * 40, "rot13", "undefined", "unicode_escape"))
    charset = named.map(lambda name: f'<meta charset="{name}"><p>a</p>')
    return (nest | attributes | charset | texts()).map(lambda text: encoded(f"<html><body>{text}"))


def rows() -> st.SearchStrategy[bytes]:
    """A table: one long cell, thousands of columns, quotes that never end."""
    cell = runs().map(lambda text: f"id,text\n1,{text}\n") | runs().map(lambda text: f'id,text\n1,"{text}')
    wide = st.sampled_from((17, 1_000, 16_000)).map(lambda count: "a," * count + "\n" + "1," * count)
    long = st.sampled_from((100, 5_000)).map(lambda count: "id;text\n" + "1;a\n" * count)
    return st.builds(encoded, cell | wide | long | texts(), st.sampled_from(ENCODINGS))


def lines() -> st.SearchStrategy[bytes]:
    """JSON lines: a good one with a change, good and bad ones, thousands of them."""
    deep = deep_json().map(lambda raw: json.dumps({**LINE, "metadata": {"a": 0}}).replace('"a": 0', f'"a": {raw}'))
    many = st.sampled_from((2, 300, 1_001, 3_000)).map(
        lambda n: "\n".join(f'{{"id": "{at}", "text": "a"}}' for at in range(n))
    )
    around = st.sampled_from(("", "\n", "\n" * 3_000, json.dumps(LINE) + "\n", "{\n"))
    line = st.one_of(mutated(LINE), mutated(LINE), deep, many, values())
    return st.builds(lambda before, text: encoded(before + text), around, line)


def markup() -> st.SearchStrategy[str]:
    """Text for a place inside XML: escaped, nested, or not well-formed."""
    nest = st.sampled_from(DEPTHS).map(lambda depth: ("<w:x>" * depth)[:50_000] + ("</w:x>" * depth)[:50_000])
    entities = st.just("&a;" * 500) | st.just("&#0;") | st.just("&#xD800;") | st.just("]]>")
    return texts().map(lambda text: escape(text[:50_000])) | nest | entities | runs(2_000)


BEFORE = (
    "",
    '<?xml version="1.0" encoding="utf-16"?>',
    '<!DOCTYPE a [<!ENTITY a "b">]>',
    "<!DOCTYPE a [" + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10 if n else "b"}">' for n in range(9)) + "]>",
    '<!DOCTYPE a SYSTEM "file:///etc/passwd">',
)
OUTSIDE = (
    "../../a.xml",
    "/etc/passwd",
    "word/document.xml",
    "a" * 300,
    "\\..\\a",
    "[Content_Types].xml",
    "xl/sharedStrings.xml",
)


def _docx(text: str, inner: str, before: str) -> bytes:
    body = paragraph(text[:20_000]) + f"<w:p><w:r><w:t>{inner}</w:t></w:r></w:p>" + table([text[:9]] * 40)
    return docx(body, title=inner[:5_000], before=before)


def _xlsx(text: str, inner: str, before: str) -> bytes:
    cells = row(text[:20_000], 1, f'<c r="XFD1048576" t="s"><v>{inner[:300]}</v></c>', "<c><v>1e999</v></c>")
    return xlsx({escape(text[:40], quote=True): cells * 3, "b": before + inner}, strings=[f"<t>{inner}</t>"])


def _pptx(text: str, inner: str, before: str) -> bytes:
    return pptx(shape(text[:20_000], kind="title") + inner, shape(text[:100]), notes={0: inner[:3_000]}, before=before)


def _epub(text: str, inner: str, before: str) -> bytes:
    return epub({"nav.xhtml": inner, "a.xhtml": f"<html><body><p>{escape(text)}</p>{inner}"}, opf=before)


def packages(suffix: str) -> st.SearchStrategy[bytes]:
    """Office files and books: hostile inside, with parts that are missing, outside or far larger than they look."""
    make = {"docx": _docx, "xlsx": _xlsx, "pptx": _pptx, "epub": _epub}[suffix]
    made = st.builds(make, texts(), markup(), st.sampled_from(BEFORE))
    return made | st.builds(
        _repacked, made, st.sampled_from(OUTSIDE), st.sampled_from(("bomb", "less", "more", "twice"))
    )


def _repacked(data: bytes, name: str, change: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        parts = {part: package.read(part) for part in package.namelist()}
    if change == "bomb":
        largest = max(parts, key=lambda part: len(parts[part]))
        return archive({**parts, largest: parts[largest] + b" " * ZEROS})
    if change == "less":
        return archive({part: content for part, content in parts.items() if len(part) % 2})
    if change == "more":
        return archive({name: b"a", **parts, **{f"ppt/slides/slide{at}.xml": b"<a/>" for at in range(300)}})
    return data + archive({name: b"a"})


def mails() -> st.SearchStrategy[bytes]:
    """Messages: parts within parts, headers that never end, encodings that do not exist."""
    head = "Subject: {}\r\nFrom: a@b.example\r\nMIME-Version: 1.0\r\n"
    part = "Content-Type: multipart/mixed; boundary=b{0}\r\n\r\n--b{0}\r\n"
    deep = st.sampled_from((2, 100, 960, 1_200)).map(
        lambda count: head.format("a") + "".join(part.format(at) for at in range(count)) + "\r\na"
    )
    odd = st.builds(
        lambda text, charset, coding: (
            f"Subject: {text[:20_000]}\r\nContent-Type: text/html; charset={charset}\r\n"
            f"Content-Transfer-Encoding: {coding}\r\n\r\n{text[:30_000]}"
        ),
        texts(),
        st.sampled_from(("utf-8", "utf-7", "undefined", "unicode_escape", "rot13", "idna", "x" * 500, "\0")),
        st.sampled_from(("8bit", "base64", "quoted-printable", "x-uuencode", "rot13")),
    )
    words = runs(3_000).map(lambda text: "Subject: =?utf-8?q?" + text + "?=\r\n\r\na")
    many = st.sampled_from((100, 3_000)).map(lambda count: "X-A: a\r\n" * count + "\r\na")
    return (deep | odd | words | many | texts()).map(encoded)


def portable() -> st.SearchStrategy[bytes]:
    """PDFs: nested objects, pages that hold themselves, streams that are not what they say, files that break off."""
    shown = texts().map(lambda text: pdf(stream(b"BT /F1 12 Tf (" + encoded(text, "latin-1") + b") Tj ET"), "a"))
    nest = st.sampled_from(DEPTHS).map(
        lambda depth: pdf("a", trailer=b" /A " + b"[" * depth + b"]" * depth + b" /B " + b"<<" * min(depth, 9_000))
    )
    pages = st.sampled_from((1, 300)).map(lambda count: pdf(*["a"] * count, info={"Title": "(" * 300}))
    loop = st.just(pdf("a").replace(b"/Kids [5 0 R]", b"/Kids [2 0 R]").replace(b"/Kids [6 0 R]", b"/Kids [2 0 R]"))
    bomb = st.just(pdf(stream(b"0" * 3_000, b"/Filter [" + b"/FlateDecode " * 300 + b"]")))
    return shown | nest | pages | loop | bomb


CONTENTS = {
    "txt": plain(),
    "md": markdown(),
    "html": web_page(),
    "csv": rows(),
    "jsonl": lines(),
    **{suffix: packages(suffix) for suffix in ("xlsx", "docx", "pptx", "epub")},
    "eml": mails(),
    "pdf": portable(),
}


@st.composite
def contents(draw: st.DrawFn, suffix: str) -> bytes:
    """The content of a file of this format: some are cut, changed in a byte, or of another format."""
    data = draw(CONTENTS[suffix])
    change = draw(st.sampled_from((*("none",) * 8, "cut", "byte", "other")))
    if change == "cut":
        return data[: len(data) // 2]
    if change == "byte" and data:
        at = draw(st.integers(0, len(data) - 1))
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
    return draw(CONTENTS[draw(st.sampled_from(SUFFIXES))]) if change == "other" else data


NAMES = (
    *("a.{}", "a.{}", "a.{}", "../../a.{}", "/etc/a.{}", "a\\b.{}", "é漢.{}", "C:\\a.{}", "a.{}.exe", ".{}", "{}"),
    *(
        "a b\t.{}",
        '\\".{}',
        "a;b.{}",
        "%0d%0aX: a.{}",
        "\x1b[31m.{}",
        "-rf.{}",
        "a" * 600 + ".{}",
        "CON.{}",
        "a.{}/",
        "\ufeff.{}",
    ),
)


def part(name: str, content: bytes, filename: bytes | None = None, more: bytes = b"") -> bytes:
    """Make one part of a form, without what is between parts."""
    file = b"" if filename is None else b'; filename="%s"' % filename
    return b'Content-Disposition: form-data; name="%s"%s\r\n%s\r\n%s' % (name.encode(), file, more, content)


def form(boundary: bytes, parts: list[bytes], ended: bool = True) -> bytes:
    """Join the parts of a form."""
    return b"".join(b"--%s\r\n%s\r\n" % (boundary, each) for each in parts) + b"--%s--\r\n" % boundary * ended


@st.composite
def uploads(draw: st.DrawFn, suffix: str) -> bytes:
    """The body of an upload with boundary `b`: one file or several, and perhaps fields."""
    names = st.sampled_from(NAMES).map(lambda name: name.format(suffix).encode())
    file = st.builds(lambda name, content: part("files", content, name), names, contents(suffix))
    fields = st.one_of(
        mutated({"kind": "report"}).map(lambda raw: part("metadata", encoded(raw))),
        texts().map(lambda text: part("collection", encoded(text))),
        st.sampled_from(STRANGE).map(lambda raw: part("metadata", encoded(raw), b"a", b"Content-Type: a/b\r\n")),
    )
    return form(b"b", [*draw(st.lists(file, min_size=1, max_size=2)), *draw(st.lists(fields, max_size=1))])


ODD_FORMS = (
    (b"b", form(b"b", [part("files", b"a", b"a.txt")] * 1_000)),
    (b"b", form(b"b", [part(f"a{at}", b"a") for at in range(1_500)])),
    (b"b", form(b"b", [part("files", b"a", b"a.txt")], ended=False)),
    (b"b", form(b"b", [part("files", b"a", b"a.txt", b"X-A: " + b"a" * 20_000 + b"\r\n")])),
    (b"b", form(b"b", [part("files", b"a", b"a.txt", b"X-A: a\r\n" * 3_000)])),
    (b"b", form(b"b", [b"\r\n" + b"a" * 100, b"no header", b": \r\n\r\n", b"Content-Disposition: a\r\n\r\na"])),
    (b"b", b"--b" * 20_000),
    (b"b", b"\r\n" * 30_000 + b"--b--"),
    (b"b", b"-" * 60_000),
    (b"a" * 70, form(b"a" * 70, [part("files", b"\r\n--" + b"a" * 69 + b"b", b"a.txt")] * 300)),
    (b"a" * 5_000, form(b"a" * 5_000, [part("files", b"a", b"a.txt")])),
    (b"", form(b"", [part("files", b"a", b"a.txt")])),
    (b'"b b"', form(b"b b", [part("files", b"a", b"a.txt")])),
    (b"\xff\x00", form(b"\xff\x00", [part("files", b"a", b"a.txt")])),
    (b"b", form(b"b", [part("files", b"a", b"\xff\xfe.txt"), part("files", b"a", b"a\x00.txt")])),
    (b"b", form(b"b", [part("metadata", b"{}"), part("metadata", b"{"), part("files", b"a")])),
)
"""Boundaries, and bodies that belong to them."""

"""Files that cost the most for their size, made on the spot: what parsers and the splitter do worst."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping

from tests.ingest.formats.files import archive, docx, paragraph, pdf
from tests.ingest.formats.packages import NAMES, R, cell, epub, links, row, shape, xlsx

WORD = "harbour "


def filled(piece: str, size: int) -> bytes:
    """Repeat a piece of text up to a size in bytes."""
    data = piece.encode()
    return data * max(1, size // len(data))


def one_row(size: int) -> bytes:
    """A table of one row of as many columns as fit."""
    count = size // 2 // 8
    names = ",".join(f"c{at:06d}" for at in range(count))
    return f"{names}\n{','.join(['1234567'] * count)}\n".encode()


def nested_message(size: int) -> bytes:
    """A message whose parts hold parts, deeper and deeper, each with a header of its own."""
    depth, out, ends = size // 120, [b"From: a@tarn.example\nSubject: Nested\n"], []
    for at in range(depth):
        out.append(b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (at, at))
        ends.append(b"\n--b%d--\n" % at)
    return b"".join([*out, b"Content-Type: text/plain\n\nThe harbour.\n", *reversed(ends)])


def slides_without_parts(size: int) -> bytes:
    """A presentation that names far more slides than it holds; the list packs well."""
    count = size // 8
    ids = "".join(f'<p:sldId id="{at}" r:id="r{at}"/>' for at in range(count))
    names = "".join(f'<Relationship Id="r{at}" Type="{R}/slide" Target="slides/slide{at}.xml"/>' for at in range(count))
    return archive(
        {
            "_rels/.rels": links(("officeDocument", "ppt/presentation.xml")),
            "ppt/presentation.xml": f'<p:presentation {NAMES} xmlns:r="{R}">{ids}</p:presentation>'.encode(),
            "ppt/_rels/presentation.xml.rels": f'<Relationships xmlns="urn:r">{names}</Relationships>'.encode(),
        }
    )


def slides_of_one_part(size: int) -> bytes:
    """A presentation that shows one slide again and again; its markup is long and holds no text."""
    ids = '<p:sldId id="1" r:id="r1"/>' * (size // 400)
    empty = shape() * (size // 40)
    return archive(
        {
            "_rels/.rels": links(("officeDocument", "ppt/presentation.xml")),
            "ppt/presentation.xml": f'<p:presentation {NAMES} xmlns:r="{R}">{ids}</p:presentation>'.encode(),
            "ppt/_rels/presentation.xml.rels": links(("slide", "slides/slide1.xml")),
            "ppt/slides/slide1.xml": f"<p:sld {NAMES}>{empty}</p:sld>".encode(),
        }
    )


def noise(size: int) -> str:
    """Words that do not pack, so that the size of an archive is that of its text."""
    chosen = random.Random(7)
    return " ".join("".join(chosen.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=8)) for _ in range(size // 9))


FILES: Mapping[str, Callable[[int], bytes]] = {
    "one-cell.csv": lambda size: b"name,text\nTarn," + filled("a", size),
    "one-row.csv": one_row,
    "quotes.csv": lambda size: b"name,text\nTarn," + filled('"a""', size),
    "backticks.md": lambda size: filled("`", size),
    "brackets.md": lambda size: filled("[", size),
    "links.md": lambda size: filled("[a](b)", size),
    "emphasis.md": lambda size: filled("*a ", size),
    "quotes.md": lambda size: filled(">", size),
    "heading.md": lambda size: b"# " + filled(WORD, size),
    "headings.md": lambda size: filled("# a\n", size),
    "fences.md": lambda size: filled("```\n", size),
    "no-spaces.txt": lambda size: filled("a", size),
    "spaces.txt": lambda size: filled("1" + " " * 63, size),
    "lines.txt": lambda size: b"a" + filled("\n", size) + b"b",
    "ideographs.txt": lambda size: filled("漢字港", size),
    "marks.txt": lambda size: filled("e\u0301\u0301\u0301", size),
    "joined.txt": lambda size: filled("👩\u200d", size),
    "controls.txt": lambda size: filled("a" * 99 + "\x01", size),
    "nested.html": lambda size: filled("<div>", size) + b"The harbour.",
    "spans.html": lambda size: b"<table>" + filled('<tr><td colspan="1000" rowspan="65534">a', size),
    "rows.html": lambda size: filled("<table><tr><td>a", size),
    "entities.html": lambda size: filled("&amp;&#x41;", size),
    "attributes.html": lambda size: b"<p " + filled("a%d=b " * 100 % tuple(range(100)), size) + b">The harbour.",
    "formatting.html": lambda size: filled("<b><i><a><font>", size // 2) + filled("</p>a", size // 2),
    "anchors.html": lambda size: filled('<a href="#">#</a>', size),
    "rows.xlsx": lambda size: xlsx({"S": row("name", "text") + "<row/>" * size + row("Tarn", "Harbour")}),
    "cells.xlsx": lambda size: xlsx({"S": row("name", "text") + row("Tarn", noise(size))}),
    "strings.xlsx": lambda size: xlsx(
        {"S": "".join(row(cell(0, kind="s")) for _ in range(size // 64))}, [f"<t>{WORD * (size // 64)}</t>"]
    ),
    "paragraphs.docx": lambda size: docx(paragraph("a") * (size // 2)),
    "rows.docx": lambda size: docx("<w:tr><w:tc>" * (size // 4) + paragraph("The harbour.")),
    "styles.docx": lambda size: docx(
        paragraph("a"),
        styles="".join(
            f'<w:style w:styleId="s{at}"><w:basedOn w:val="s{at + 1}"/></w:style>' for at in range(size // 32)
        ),
    ),
    "missing.pptx": slides_without_parts,
    "again.pptx": slides_of_one_part,
    "spine.epub": lambda size: epub({f"c{at}": f"<p>{at}</p>" for at in range(size // 256)}),
    "closed.epub": lambda size: epub({"c": "<a " + "b " * (size * 4)}),
    "nested.eml": nested_message,
    "headers.eml": lambda size: (
        b"Subject: a\n" + filled("To: Ada <ada@tarn.example>,\n\tb@c\n", size) + b"\nThe harbour.\n"
    ),
    "address.eml": lambda size: b"Subject: a\nTo: " + filled("(", size) + b"\n\nThe harbour.\n",
    "pages.pdf": lambda size: pdf(*["a"] * (size // 300)),
    "line.jsonl": lambda size: json.dumps({"id": "line", "text": "[" * size}).encode(),
}
"""Name of a file → its bytes, for about so many bytes of it."""

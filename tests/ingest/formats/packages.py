"""Small presentations, workbooks and e-books, made on the spot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tests.ingest.formats.files import archive

R = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
STRICT_R = "http://purl.oclc.org/ooxml/officeDocument/relationships"
NAMES = 'xmlns:a="urn:a" xmlns:p="urn:p" xmlns:mc="urn:mc"'


def links(*targets: tuple[str, str], more: str = "") -> bytes:
    """Make relationships r1, r2, … of (kind, target). more: further ones, as XML."""
    entries = "".join(
        f'<Relationship Id="r{at}" Type="{R}/{kind}" Target="{target}"/>'
        for at, (kind, target) in enumerate(targets, 1)
    )
    return f'<Relationships xmlns="urn:r">{entries}{more}</Relationships>'.encode()


def shape(*paragraphs: str, kind: str = "") -> str:
    """Make a shape. kind: of its placeholder."""
    place = f'<p:nvSpPr><p:nvPr><p:ph type="{kind}"/></p:nvPr></p:nvSpPr>' if kind else ""
    body = "".join(f"<a:p><a:r><a:t>{escape(text)}</a:t></a:r></a:p>" for text in paragraphs)
    return f"<p:sp>{place}<p:txBody>{body}</p:txBody></p:sp>"


def pptx(
    *slides: str, notes: Mapping[int, str] | None = None, before: str = "", relations: str = R, **more: bytes
) -> bytes:
    """Make a presentation. slides: shapes as XML, in the reverse order of their files; before: XML ahead of a slide."""
    count = len(slides)
    names = [f"slides/slide{count - at}.xml" for at in range(count)]
    ids = "".join(f'<p:sldId id="{256 + at}" r:id="r{at + 1}"/>' for at in range(count))
    parts = {
        "_rels/.rels": links(("officeDocument", "ppt/presentation.xml")),
        "ppt/presentation.xml": (
            f'<p:presentation {NAMES} xmlns:r="{relations}"><p:sldIdLst>{ids}</p:sldIdLst></p:presentation>'.encode()
        ),
        "ppt/_rels/presentation.xml.rels": links(*(("slide", name) for name in names)),
    }
    for at, (name, content) in enumerate(zip(names, slides, strict=True)):
        slide = content if content.startswith("<p:sld") else f"<p:sld {NAMES}>{content}</p:sld>"
        parts[f"ppt/{name}"] = (before + slide).encode()
        if notes and at in notes:
            parts[f"ppt/slides/_rels/slide{count - at}.xml.rels"] = links(("notesSlide", f"../notesSlides/n{at}.xml"))
            parts[f"ppt/notesSlides/n{at}.xml"] = f"<p:notes {NAMES}>{notes[at]}</p:notes>".encode()
    return archive({**parts, **more})


def cell(value: object, style: int | None = None, kind: str = "", at: str = "") -> str:
    """Make a cell: text inline, a number as it is, or any kind of content."""
    named = (f' r="{at}"' if at else "") + (f' s="{style}"' if style is not None else "")
    if isinstance(value, str) and not kind:
        return f'<c{named} t="inlineStr"><is><t>{escape(value)}</t></is></c>'
    return f"<c{named}" + (f' t="{kind}"' if kind else "") + f"><v>{value}</v></c>"


def row(*values: object, more: str = "") -> str:
    """Make a row of cells."""
    made = (value if isinstance(value, str) and value.startswith("<c") else cell(value) for value in values)
    return f"<row{more}>{''.join(made)}</row>"


def xlsx(
    sheets: Mapping[str, str], strings: Sequence[str] = (), styles: str = "", properties: str = "", **more: bytes
) -> bytes:
    """Make a workbook. sheets: rows as XML by name; a name that begins with `!` is hidden. more: further parts."""
    listed = "".join(
        f'<sheet name="{name.lstrip("!")}" sheetId="{at}" r:id="r{at}"' + (' state="hidden"/>' if "!" in name else "/>")
        for at, name in enumerate(sheets, 1)
    )
    parts = {
        "_rels/.rels": links(("officeDocument", "/xl/workbook.xml")),
        "xl/workbook.xml": f'<workbook xmlns:r="{R}">{properties}<sheets>{listed}</sheets></workbook>'.encode(),
        "xl/_rels/workbook.xml.rels": links(*(("worksheet", f"worksheets/s{at}.xml") for at in range(len(sheets)))),
        "xl/sharedStrings.xml": f"<sst>{''.join(f'<si>{text}</si>' for text in strings)}</sst>".encode(),
        "xl/styles.xml": f"<styleSheet>{styles}</styleSheet>".encode(),
    }
    for at, rows in enumerate(sheets.values()):
        parts[f"xl/worksheets/s{at}.xml"] = f"<worksheet><sheetData>{rows}</sheetData></worksheet>".encode()
    return archive({**parts, **more})


def epub(chapters: Mapping[str, str | bytes], order: Sequence[str] = (), opf: str = "", **more: bytes) -> bytes:
    """Make a book. chapters: pages by name; order: of the names; opf: XML ahead of the package; more: further parts."""
    items = "".join(
        f'<item id="{name}" href="text/{name.replace(" ", "%20")}" media-type="application/xhtml+xml"'
        + (' properties="nav"/>' if name.startswith("nav") else "/>")
        for name in chapters
    )
    spine = "".join(f'<itemref idref="{name}"/>' for name in order or chapters)
    package = (
        '<package><metadata xmlns:dc="urn:dc"><dc:title>The yard</dc:title><dc:language>en</dc:language></metadata>'
        f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    parts = {
        "mimetype": b"application/epub+zip",
        "META-INF/container.xml": b'<container><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>',
        "OPS/book.opf": (opf + package).encode(),
    }
    for name, page in chapters.items():
        parts[f"OPS/text/{name}"] = page if isinstance(page, bytes) else page.encode()
    return archive({**parts, **{name.replace("__", "/"): data for name, data in more.items()}})

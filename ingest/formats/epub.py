"""E-books in EPUB to text: the chapters in the order in which they are read, each as html.py reads a page.

    META-INF/container.xml     where the package document is
    META-INF/encryption.xml    which parts are encrypted
    *.opf                      title, language, parts (manifest), and their order (spine)

The table of contents is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats import html
from ragkv.ingest.formats.base import MAX_TITLE, Parsed, TextRoom, one_line
from ragkv.ingest.formats.elements import MAIN
from ragkv.ingest.formats.package import Package, PartHandler, open_package, target_of
from ragkv.ingest.formats.page_source import decode, html_of

_KINDS = {"application/xhtml+xml", "text/html"}
_LINK = re.compile(r"<link\b[^<>]{0,500}>", re.IGNORECASE)
_HREF = re.compile(r"""\bhref\s?=\s?["']([^"'#?]{1,300})""", re.IGNORECASE)
_IMPORT = re.compile(r"""@import\s{1,9}(?:url\(\s{0,9})?["']?([^"')\s;]{1,300})["')]""", re.IGNORECASE)
_LONGEST_SHEET = 1 << 20
"""Characters of a style sheet with those that it imports."""
_MOST_IMPORTED = 8
"""Style sheets that a style sheet names, and those in each other."""
_BETWEEN = "\n\n"


def parse(data: bytes, limit: int) -> Parsed:
    """Parse a book. The title is that of its package document.

    Raises:
        InvalidDocument: The file is no book, is damaged or protected.
        TooLarge: The text has over `limit` bytes, or its parts over UNPACKED_BYTES.
    """
    with open_package(data, "EPUB") as package:
        return _parse(package, limit)


def _parse(package: Package, limit: int) -> Parsed:
    container, encrypted = _Container(), _Encrypted()
    package.read("META-INF/container.xml", container)
    if container.book not in package.names:
        raise InvalidDocument("it is no EPUB: a zip archive without a book")
    package.read("META-INF/encryption.xml", encrypted)
    book = _Book(container.book.rpartition("/")[0])
    package.read(container.book, book)
    room, texts, encodings, styles = TextRoom(limit), list[str](), set[str](), _Styles(package)
    for name in book.chapters():
        if name in encrypted.names:
            raise InvalidDocument("it is protected against copying (DRM)")
        if name in package.names:
            source, encoding = decode(package.bytes_of(name))
            encodings.add(encoding)
            page = html.parse_text(html_of(source), limit, MAIN, styles.of_page(name, source))
            if text := page.text.rstrip():  # a line that is indented begins with spaces
                texts.append(room.take(text))
    language = {"language": one_line(book.language)} if book.language.strip() else {}
    encodings.discard("")
    said = {"encoding": ", ".join(sorted(encodings))} if encodings else {}
    return Parsed(one_line(book.title), _BETWEEN.join(texts), {"format": "epub", **language, **said})


class _Styles:
    """The style sheets of a book. Each is read once."""

    def __init__(self, package: Package):
        self._package = package
        self._sheets: dict[str, str] = {}

    def of_page(self, name: str, source: str) -> list[str]:
        """Return the style sheets that the chapter of this name links to."""
        head, folder = source[: source.find("<body")], name.rpartition("/")[0]
        links = (_HREF.search(link) for link in _LINK.findall(head) if "stylesheet" in link and "alternate" not in link)
        return [self._sheet(target_of(folder, unquote(link[1])), 0) for link in links if link]

    def _sheet(self, name: str, depth: int) -> str:
        """Return a style sheet behind those that it imports."""
        if name not in self._sheets:
            self._sheets[name] = ""  # what imports itself has no more
            own = self._package.bytes_of(name).decode(errors="replace") if name in self._package.names else ""
            others = _IMPORT.findall(own)[:_MOST_IMPORTED] if "@import" in own and depth < _MOST_IMPORTED else ()
            folder = name.rpartition("/")[0]
            whole = "\n".join([*(self._sheet(target_of(folder, unquote(other)), depth + 1) for other in others), own])
            self._sheets[name] = whole[:_LONGEST_SHEET]
        return self._sheets[name]


class _Container(PartHandler):
    def __init__(self) -> None:
        self.book = ""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "rootfile" and not self.book:
            self.book = attributes.get("full-path", "")


class _Encrypted(PartHandler):
    def __init__(self) -> None:
        self.names = set[str]()

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "CipherReference":
            self.names.add(unquote(attributes.get("URI", "")))


class _Book(PartHandler):
    """Collects what the package document says."""

    def __init__(self, folder: str) -> None:
        self.title = self.language = ""
        self._folder = folder
        self._parts: dict[str, str] = {}
        self._order: list[str] = []
        self._inside = ""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        is_other = (tag == "title" and self.title) or (tag == "language" and self.language)
        self._inside = "" if is_other else tag
        if tag == "item" and attributes.get("media-type") in _KINDS:
            if "nav" not in attributes.get("properties", "").split():
                name = unquote(attributes.get("href", "").partition("#")[0])
                self._parts[attributes.get("id", "")] = target_of(self._folder, name)
        elif tag == "itemref":
            self._order.append(attributes.get("idref", ""))

    def end(self, tag: str) -> None:
        self._inside = ""

    def text(self, text: str) -> None:
        if self._inside == "title" and len(self.title) < MAX_TITLE:
            self.title += text
        elif self._inside == "language" and len(self.language) < MAX_TITLE:
            self.language += text

    def chapters(self) -> list[str]:
        """Return the names of the chapters in order, each once."""
        return list(dict.fromkeys(self._parts[id] for id in self._order if id in self._parts))
